"""A sample of our own tasks, some of each kind of work, for figures that a few minutes must do for."""

from cuda_l2.records import Operation
from cuda_l2.tasks._base import definition

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


def sample(target: str) -> list[Operation]:
    """These tasks at their sizes for a target, cpu or cuda."""
    named = [(name, "float32") for name in NAMES] + [(name, "float16") for name in IN_16_BITS]
    return [definition(name).task(dtype=dtype, target=target) for name, dtype in named]
