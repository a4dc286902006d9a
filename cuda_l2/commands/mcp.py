"""cuda-l2 mcp: let a coding agent write kernels, over the Model Context Protocol."""

import contextlib
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cuda_l2 import tasks
from cuda_l2.commands._options import require_target, tell
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.machine import chosen
from cuda_l2.records import Task
from cuda_l2.settings import BUDGET, Settings
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import imported
from cuda_l2.system.paths import endpoint_key
from cuda_l2.system.place import Place
from cuda_l2.system.text import counted

if TYPE_CHECKING:
    from cuda_l2.agents.workshop import Workshop


def command(
    shapes: Annotated[list[str], Parameter(required=True)],
    /,
    *,
    budget_s: Annotated[float, BUDGET] = 3600.0,
    trials: int = 200,
    http: int | None = None,
    token_variable: str = "CUDA_L2_MCP_TOKEN",
    target: str = "auto",
    archive: Place | None = None,
    protocol: str = "standard",
    kernelbench: Path | None = None,
    without_sandbox: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Serve tools to a coding agent, with which it reads tasks, submits kernels and sees what becomes of them.

    Over standard input and output, for one agent that starts this command, until it closes them; docs/llm.md says how
    to register it. What agents submit is judged in the sandbox and kept in the archive, as a search's candidates are.

    Args:
        shapes: The shapes that agents may work on, as in 512x512x512, or other tasks, as in
            softmax:rows=64,columns=1000.
        budget_s: Time for all submissions together, from the first on, as in 60s or 2h. Reports come on top.
        trials: Largest number of kernels submitted.
        http: Serve HTTP on this port of 127.0.0.1 instead, for several agents, until Ctrl-C; 0 for any free port.
            Requests need the token.
        token_variable: Environment variable that holds the token for --http; without it one is made and printed.
        target: Machine to write for: cpu, cuda, or auto for the GPU where there is one.
        archive: File that keeps every trial, or postgresql://USER@HOST/DATABASE.
        protocol: How the report measures: standard, offline or paper.
        kernelbench: Folder of a KernelBench checkout, for tasks as kernelbench/level1/19.
        without_sandbox: Build and run agents' kernels also where no sandbox shuts them off from the file system.
    """
    require_target(target)
    if http is not None and not 0 <= http < 1 << 16:
        raise UserError(f"--http must be a port from 0 to 65535, not {http}")
    settings = Settings(
        budget_s=budget_s,
        trials=trials,
        policy="random",  # nobody asks it
        target=target,
        archive=archive,
        protocol=protocol,
        model=ModelSettings(without_sandbox=without_sandbox),
    )
    wanted = [tasks.parse(shape, chosen(target), kernelbench) for shape in shapes]
    agents = imported("cuda_l2.agents.server", "cuda-l2 mcp needs", "mcp")

    from cuda_l2.agents.wire import Wire

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clients end servers so: nothing is to be left behind
    opened = partial(_opened, wanted, settings)
    if http is None:
        if sys.stdin and sys.stdin.isatty():
            tell("an agent starts this command and talks to it; docs/llm.md says how to register it. Ctrl-C ends it")
        with Wire() as wire:
            agents.serve(opened, lambda server: server.serve_stdio(wire))
        return
    with _listen(http) as listening:
        token = endpoint_key(token_variable) or secrets.token_urlsafe(24)
        tell(f"http://127.0.0.1:{listening.getsockname()[1]}/mcp, with the header Authorization: Bearer {token}")
        agents.serve(opened, lambda server: server.serve_http(listening, token))


@contextlib.contextmanager
def _opened(wanted: list[Task], settings: Settings) -> Iterator["Workshop"]:
    """The workshop for these tasks; says at its end what was submitted."""
    from cuda_l2.agents.workshop import Workshop
    from cuda_l2.optimizer import Optimizer
    from cuda_l2.propose._model_policy import require_sandbox

    require_sandbox(settings.model.without_sandbox)
    with Optimizer(settings) as optimizer, Workshop(optimizer, wanted) as workshop:
        try:
            yield workshop
        finally:
            tell(f"{counted(workshop.submitted, 'kernel')} submitted; `cuda-l2 exchanges` lists them")


def _listen(port: int) -> socket.socket:
    """A socket on a port of the loopback address; UserError where it cannot be had."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise UserError(f"cannot listen on port {port}: {error.strerror}; choose another with --http, or 0") from None
