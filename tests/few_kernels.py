"""torch.compile without precompiled headers in the processes of files of others.

Each such process has a folder of its own, where the headers are compiled first: 6 s of a core, which pay from the third
kernel on. The files of the tests have one or two.
"""

from collections.abc import Callable
from typing import Any

from cuda_l2.kernelbench import sandboxed

NO_HEADERS = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}


def install(replace: Callable[[Any, str, Any], None]) -> None:
    """replace: sets an attribute, as `setattr` does."""
    environment = sandboxed.environment
    replace(sandboxed, "environment", lambda *given, **kinds: environment(*given, **kinds) | NO_HEADERS)
