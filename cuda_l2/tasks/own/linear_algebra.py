"""Products, solves and factorisations of matrices, in the task's type."""

import torch
import torch.nn.functional as F

from cuda_l2.tasks._base import Definition
from cuda_l2.tasks.values import Domain, Values, normal

_MNK_CPU, _MNK_GPU = {"m": 96, "n": 128, "k": 256}, {"m": 2048, "n": 4096, "k": 1024}


TASKS = (
    Definition(
        "matmul", lambda a, b: a @ b, {"a": normal("m k"), "b": normal("k n")}, _MNK_CPU, _MNK_GPU, flops="2*m*n*k"
    ),
    Definition(
        "matmul_at",
        lambda a, b: a.mT @ b,
        {"a": normal("k m"), "b": normal("k n")},
        _MNK_CPU,
        _MNK_GPU,
        flops="2*m*n*k",
    ),
    Definition(
        "batched_matmul",
        lambda a, b: torch.bmm(a, b),
        {"a": normal("batch m k"), "b": normal("batch k n")},
        {"batch": 6, "m": 32, "n": 48, "k": 64},
        {"batch": 96, "m": 512, "n": 512, "k": 128},
        flops="2*batch*m*n*k",
    ),
    Definition(
        "matvec",
        lambda a, x: a @ x,
        {"a": normal("m k"), "x": normal("k")},
        {"m": 256, "k": 512},
        {"m": 16384, "k": 8192},
        flops="2*m*k",
    ),
    Definition(
        "outer_product_update",
        lambda a, x, y: a - torch.outer(x, y),
        {"a": normal("m n"), "x": normal("m"), "y": normal("n")},
        {"m": 128, "n": 192},
        {"m": 8192, "n": 8192},
        flops="2*m*n",
    ),
    Definition(
        "linear_bias_gelu",
        lambda x, w, bias: F.gelu(F.linear(x, w, bias)),
        {"x": normal("rows inner")},
        {"rows": 64, "inner": 128, "outer": 192},
        {"rows": 4096, "inner": 1024, "outer": 4096},
        {"w": normal("outer inner", "inner"), "bias": normal("outer")},
        flops="2*rows*inner*outer",
    ),
    Definition(
        "linear_residual_layer_norm",
        lambda x, residual, w, gain, shift: F.layer_norm(F.linear(x, w) + residual, gain.shape, gain, shift),
        {"x": normal("rows inner"), "residual": normal("rows outer")},
        {"rows": 64, "inner": 128, "outer": 96},
        {"rows": 8192, "inner": 1024, "outer": 1024},
        {"w": normal("outer inner", "inner"), "gain": normal("outer"), "shift": normal("outer")},
        flops="2*rows*inner*outer",
    ),
    Definition(
        "swiglu",
        lambda x, gate, up, down: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
        {"x": normal("rows inner")},
        {"rows": 32, "inner": 96, "hidden": 256},
        {"rows": 4096, "inner": 2048, "hidden": 5632},
        {
            "gate": normal("hidden inner", "inner"),
            "up": normal("hidden inner", "inner"),
            "down": normal("inner hidden", "hidden"),
        },
        flops="6*rows*inner*hidden",
    ),
    Definition(
        "low_rank_adapter",
        lambda x, w, down, up: F.linear(x, w) + F.linear(F.linear(x, down), up),
        {"x": normal("rows inner")},
        {"rows": 64, "inner": 128, "outer": 128, "rank": 8},
        {"rows": 4096, "inner": 4096, "outer": 4096, "rank": 16},
        {
            "w": normal("outer inner", "inner"),
            "down": normal("rank inner", "inner"),
            "up": normal("outer rank", "rank"),
        },
        flops="2*rows*inner*outer + 2*rows*rank*(inner+outer)",
        rigid=("rank",),
    ),
    Definition(
        "gram_matrix",
        lambda x: x.mT @ x,
        {"x": normal("rows columns", "rows")},
        {"rows": 300, "columns": 96},
        {"rows": 65536, "columns": 512},
        flops="2*rows*columns*columns",
    ),
    Definition(
        "pairwise_squared_distance",
        lambda x, y: x.square().sum(-1)[:, None] + y.square().sum(-1) - 2 * x @ y.mT,
        {"x": normal("rows inner"), "y": normal("others inner")},
        {"rows": 64, "others": 80, "inner": 32},
        {"rows": 8192, "others": 8192, "inner": 128},
        flops="2*rows*others*inner",
        indefinite=("x", "y"),
    ),
    Definition(
        "bilinear_form",
        lambda x, w, y: ((x @ w) * y).sum(-1),
        {"x": normal("rows m"), "y": normal("rows n")},
        {"rows": 64, "m": 96, "n": 80},
        {"rows": 8192, "m": 1024, "n": 1024},
        {"w": normal("m n", "m")},
        flops="2*rows*m*n",
    ),
    Definition(
        "triangular_solve",
        lambda lower, b: torch.linalg.solve_triangular(lower, b, upper=False),
        {"lower": Values("batch n n", Domain.TRIANGULAR), "b": normal("batch n columns")},
        {"batch": 4, "n": 32, "columns": 8},
        {"batch": 256, "n": 128, "columns": 64},
        flops="batch*n*n*columns",
        dtypes=("float32",),
    ),
    Definition(
        "cholesky",
        lambda a: torch.linalg.cholesky(a),
        {"a": Values("batch n n", Domain.DEFINITE)},
        {"batch": 4, "n": 32},
        {"batch": 1024, "n": 64},
        flops="batch*n*n*n/3",
        dtypes=("float32",),
    ),
)
