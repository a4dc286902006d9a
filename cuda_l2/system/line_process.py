"""A process that answers JSON lines: its standard input and output are all that it shares with who starts it."""

import base64
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from cuda_l2.system import process_tree
from cuda_l2.system.variables import given


class LineProcess:
    """A module of the package, run in a process and a process group of its own."""

    def __init__(self, module: str, *arguments: str, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        """variables: of its environment, beside those of this process."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
            env=given() | dict(variables),
        )
        self.late = False
        """Whether it was killed because it was out of time."""

    def ask(
        self,
        message: Mapping[str, Any],
        timeout_s: float = threading.TIMEOUT_MAX,
        say: Callable[[str], None] = lambda line: None,
    ) -> dict[str, Any]:
        """Its answer; empty where it ends before it has answered. Out of time it is killed.

        A line before that with `said` goes to `say`; after one with `waits` the time begins anew.
        """
        assert self._process.stdin
        limit = self._limit(timeout_s)
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            while (answer := self._line()).keys() & {"said", "waits"}:
                if "said" in answer:
                    say(answer["said"])
                else:
                    limit.cancel()
                    limit = self._limit(timeout_s)
        except (OSError, ValueError):
            answer = {}
        finally:
            limit.cancel()
        return answer

    def _limit(self, timeout_s: float) -> threading.Timer:
        limit = threading.Timer(timeout_s, self._end_late)
        limit.start()
        return limit

    def _end_late(self) -> None:
        self.late = True
        self.kill()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line.endswith("\n") else {}
        return found

    def kill(self) -> None:
        """End the process and all that it has started."""
        if self._process.poll() is None:
            process_tree.kill(self._process.pid)

    def close(self) -> int:
        """Kill the process; its exit status, negative for a signal."""
        self.kill()
        return self._process.wait()


def packed(value: Any) -> str:
    """An object as text in a line. Only between processes that trust each other: whoever writes it runs code."""
    return base64.b64encode(pickle.dumps(value)).decode()


def unpacked(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))
