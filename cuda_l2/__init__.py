"""cuda-l2: give it a machine and matrix shapes; it writes kernels, proves them correct, times them honestly.

result = cuda_l2.optimize("512x512x512", budget=60)
result.kernel(a, b, out)
result.save("512.json"); kernel = cuda_l2.load("512.json")    # in another process, or load("512x512x512")

trial = cuda_l2.evaluate(source, "512x512x512")    # a reward function: trial.reward

model = cuda_l2.accelerate(model); y = cuda_l2.matmul(x, w); cuda_l2.tune(model, inputs)    # docs/deploy.md
"""

import importlib
from typing import TYPE_CHECKING, Any

from cuda_l2.system import errors
from cuda_l2.version import __version__

if TYPE_CHECKING:
    from cuda_l2.evaluator import evaluate
    from cuda_l2.library.deploy.accelerate import accelerate, accelerated
    from cuda_l2.library.deploy.ahead import invalidate
    from cuda_l2.library.deploy.calls import matmul
    from cuda_l2.library.deploy.inductor import max_autotune
    from cuda_l2.library.deploy.tuning import tune
    from cuda_l2.library.kernel import load
    from cuda_l2.optimizer import optimize
    from cuda_l2.records import Gemm, Trial
    from cuda_l2.system.errors import UserError

__all__ = [
    "Gemm",
    "Trial",
    "UserError",
    "__version__",
    "accelerate",
    "accelerated",
    "evaluate",
    "invalidate",
    "load",
    "matmul",
    "max_autotune",
    "optimize",
    "tune",
]

_HOMES = {
    "Gemm": "cuda_l2.records",
    "Trial": "cuda_l2.records",
    "UserError": "cuda_l2.system.errors",
    "accelerate": "cuda_l2.library.deploy.accelerate",
    "accelerated": "cuda_l2.library.deploy.accelerate",
    "evaluate": "cuda_l2.evaluator",
    "invalidate": "cuda_l2.library.deploy.ahead",
    "load": "cuda_l2.library.kernel",
    "matmul": "cuda_l2.library.deploy.calls",
    "max_autotune": "cuda_l2.library.deploy.inductor",
    "optimize": "cuda_l2.optimizer",
    "tune": "cuda_l2.library.deploy.tuning",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import cuda_l2` must stay light, torch is not. UserError where torch is missing."""
    if name not in _HOMES:
        hint = "; cuda_l2.evaluate(source, shape) is what `cuda-l2 check` does" if name == "check" else ""
        raise AttributeError(f"module 'cuda_l2' has no attribute {name!r}{hint}")
    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise errors.UserError(errors.NO_TORCH) from None
    globals()[name] = value
    return value
