"""Processes of a pool on a Ray cluster: an actor in each slot has one, and hands on what is asked and answered."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cuda_l2.runs import on_ray
from cuda_l2.runs.workers import SECRETS
from cuda_l2.system.errors import UserError
from cuda_l2.system.line_process import LineProcess


class RayProcess:
    """A process on the cluster, which `Pool` uses as it does a `LineProcess`; UserError where the cluster is gone."""

    def __init__(self, module: str) -> None:
        import ray  # noqa: PLC0415 - optional

        self.late, self._status = False, 0
        with _reached():
            gpus = ray.cluster_resources().get("GPU", 0)
            self._actor: Any = ray.remote(Held).options(num_cpus=1, num_gpus=1 if gpus else 0).remote(module)

    def ask(self, message: Mapping[str, Any], timeout_s: float, say: Callable[[str], None]) -> dict[str, Any]:
        """Its answer, or `failed` where its actor gives none; empty where the process ends, or is out of time."""
        import ray  # noqa: PLC0415

        try:
            with _reached():
                ray.get(self._actor.begin.remote(dict(message), timeout_s))  # when the slot is free
                while True:
                    step = self._actor.step.remote(on_ray.STEP_S)
                    if not ray.wait([step], timeout=on_ray.ANSWER_S)[0]:
                        return {"failed": f"its actor gave no answer for {on_ray.ANSWER_S:.0f} s"}
                    lines, answer, ended = ray.get(step)
                    for line in lines:
                        say(line)
                    if ended:
                        self.late, self._status = ended
                    if answer is not None:
                        return dict(answer)
        except ray.exceptions.RayError:
            return {"failed": "its actor or its node is gone"}

    def kill(self) -> None:
        """End the actor, with which its process ends."""
        import ray  # noqa: PLC0415

        with contextlib.suppress(UserError), _reached():
            ray.kill(self._actor)

    def close(self) -> int:
        """The same; the process's exit status, negative for a signal."""
        self.kill()
        return self._status


class Held:
    """In an actor: a process of a pool, and what it has said since it was asked last."""

    def __init__(self, module: str) -> None:
        hidden = {name: "" for name in os.environ if name.startswith(SECRETS)}
        self._process = LineProcess(module, variables=hidden)
        self._lines, self._answers = list[str](), list[dict[str, Any]]()

    def begin(self, message: Mapping[str, Any], timeout_s: float) -> None:
        def ask() -> None:
            self._answers.append(self._process.ask(message, timeout_s, self._lines.append))

        self._thread = threading.Thread(target=ask, daemon=True)
        self._thread.start()

    def step(self, seconds: float) -> tuple[list[str], dict[str, Any] | None, tuple[bool, int] | None]:
        """Lines that were said, the answer if it came within this time, and where the process has ended without one
        whether it was late, and its status.
        """
        self._thread.join(seconds)
        answer = self._answers.pop() if self._answers else None
        lines = [self._lines.pop(0) for _ in range(len(self._lines))]
        ended = (self._process.late, self._process.close()) if answer == {} else None
        return lines, answer, ended


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise UserError(f"the Ray cluster is gone: {error}") from None
