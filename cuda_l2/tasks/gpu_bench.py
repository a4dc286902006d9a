"""The tasks that a GPU's figures are about: of those that families write kernels for, some of each kind of work."""

from cuda_l2.tasks._base import definition

GPU_FAMILIES = "gpu-families"
"""In a list of tasks: all of these, at their sizes for GPUs."""
NAMES = (
    *("gelu", "silu_gate", "bias_gelu_residual"),  # element by element
    *("softmax", "residual_rms_norm", "layer_norm", "variance_rows", "max_rows"),  # rows
    *("temperature_softmax", "greedy_token"),  # long rows
    *("cross_entropy", "cross_entropy_gradient", "mse"),  # losses
    *("mean_columns", "embedding_bag_sum", "embedding_position_norm"),  # columns and tables
    *("adamw", "clip_gradient_norm", "lamb"),  # optimizer steps
    *("transpose_add", "max_pool2d", "conv2d_depthwise"),  # across rows
)
IN_16_BITS = ("attention_causal", "attention_grouped_query")


def texts() -> list[str]:
    """The tasks' texts, with sizes."""
    named = [(name, "float32") for name in NAMES] + [(name, "float16") for name in IN_16_BITS]
    return [str(definition(name).task(definition(name).gpu, dtype)) for name, dtype in named]
