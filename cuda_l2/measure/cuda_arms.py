"""Names of the baselines of matrix products on a GPU. Standard library only, for tables made where there is none."""

from cuda_l2.records import Layout

TORCH, TORCH_DEFAULT = "torch.matmul", "torch.matmul, default switches"
COMPILED = "torch.compile max-autotune"
BLAS, HEURISTIC, AUTOTUNED = "cuBLAS", "cuBLASLt-heuristic", "cuBLASLt-AutoTuning"
"""Each in both layouts of B, as in 'cuBLAS NN'; the last is the one that a library must beat."""
AUTOTUNED_32F = f"{AUTOTUNED}-32F"
"""The fp32 class's choice, beside that of the fp16 class, which is not always faster."""
ARMS = (
    *(TORCH, TORCH_DEFAULT),
    *(f"{kind} {layout.name}" for kind in (BLAS, HEURISTIC, AUTOTUNED, AUTOTUNED_32F) for layout in Layout),
    COMPILED,
)
"""Every name; see `cuda_baselines.Baselines.arms`."""
