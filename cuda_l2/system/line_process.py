"""A process that answers JSON lines: its standard input and output are all that it shares with who starts it."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


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
            env={**os.environ, **variables},
        )

    def ask(self, message: Mapping[str, Any], timeout_s: float = threading.TIMEOUT_MAX) -> dict[str, Any]:
        """Its answer; empty where it ends before it has answered. Out of time it is killed."""
        assert self._process.stdin and self._process.stdout
        limit = threading.Timer(timeout_s, self._process.kill)
        limit.start()
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, ValueError):
            line = ""
        finally:
            limit.cancel()
        answer: dict[str, Any] = json.loads(line) if line.endswith("\n") else {}
        return answer

    def close(self) -> int:
        """Kill the process; its exit status, negative for a signal."""
        self._process.kill()
        return self._process.wait()
