"""The commands as one application: a file each in this folder, errors as one line, exit status 2."""

import errno
import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from typing import Any, get_args

from cyclopts import App, CycloptsError, Parameter, Token, UnknownOptionError, convert

from cuda_l2 import __version__, commands
from cuda_l2.system.errors import NO_TORCH, UserError, failure_of_machine


def exact(wanted: Any, tokens: Sequence[Token]) -> Any:
    """An option's value; ValueError for 1.5 where a whole number is wanted, which Cyclopts would round to 2."""
    if int in (wanted, *get_args(wanted)):
        for token in tokens:
            try:
                whole = "." not in token.value or float(token.value).is_integer()
            except ValueError:
                whole = False
            if not whole:
                raise ValueError(f"a whole number is wanted, not {token.value}")
    return convert(wanted, tokens)


app = App(
    name="cuda-l2",
    version=__version__,
    default_parameter=Parameter(converter=exact),
    help=(
        "Writes matrix-multiplication kernels for this machine, proves them correct, times them honestly.\n\n"
        "Start with `cuda-l2 doctor`, then `cuda-l2 optimize 512x512x512`.\n\n"
        "A shape is MxNxK in fp16; tn says that B is column-major, bf16 that elements are bf16, fp16 that sums may be:"
        " 512x512x512, 64x4096x4096:tn:bf16, 256x256x256:fp16."
    ),
    help_format="markdown",
    suppress_keyboard_interrupt=False,
)
for found in pkgutil.iter_modules(commands.__path__):
    if not found.name.startswith("_"):
        module = importlib.import_module(f"{commands.__name__}.{found.name}")
        app.command(module.command, name=found.name)
app.register_install_completion_command(name="--install-completion")


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run() -> None:
    """Run the command that the words of this process name. KeyboardInterrupt is the caller's."""
    try:
        try:
            app(exit_on_error=False, print_error=False)
        finally:
            if sys.stdout:  # None where it was closed
                sys.stdout.flush()
    except CycloptsError as error:
        of = " ".join(["cuda-l2", *(error.command_chain or ())])
        said = " ".join(str(error).split())
        if isinstance(error, UnknownOptionError) and re.match(r"-\d+x", error.token.value):
            said = f"{error.token.value}: M, N and K must be whole numbers of at least 1, as in 512x512x512"
        print(f"cuda-l2: {said if said.endswith('...') else said.rstrip('.')}; see `{of} --help`", file=sys.stderr)
        sys.exit(2)
    except UserError as error:
        print(f"cuda-l2: {error}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"cuda-l2: {NO_TORCH}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if not isinstance(error, BrokenPipeError) and error.errno not in FULL:
            raise
        if sys.stdout:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        print(f"cuda-l2: cannot write {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        said = failure_of_machine(error)
        if not said:
            raise
        print(f"cuda-l2: {said}", file=sys.stderr)
        sys.exit(2)
