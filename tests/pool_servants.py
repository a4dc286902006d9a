"""What processes of a pool do in tests: `pool` pickles it, so that they import it from here."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cuda_l2.system.errors import MachineError, UserError
from cuda_l2.system.lock import machine_lock
from cuda_l2.system.turns import Turns

FOLDER = str(Path(__file__).parent)
"""For PYTHONPATH."""


@dataclass(frozen=True)
class Scripted:
    """Answers a word with the GPUs that it sees; some words do something else before."""

    folder: Path
    """The pids of processes that were asked for a word, in a file of its name."""

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[str], str]]:
        yield self._answer

    def _answer(self, word: str) -> str:
        asked = self.folder / word
        before = asked.read_text().split() if asked.exists() else []
        with asked.open("a") as file:
            file.write(f"{os.getpid()}\n")
        print(f"cuda-l2: {word}", file=sys.stderr)
        full = word == "full" and os.environ["CUDA_VISIBLE_DEVICES"].startswith("3")
        if full or word == "deadly" or (word == "dies once" and not before):
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "hangs" or (word == "hangs once" and not before):
            time.sleep(1e6)
        held = self.folder / "held"
        if word == "hangs on 5" and os.environ["CUDA_VISIBLE_DEVICES"].startswith("5") and not held.exists():
            held.write_text(f"{os.getpid()}\n")
            time.sleep(1e6)
        if word == "starts":  # as who runs the sanitizer does
            own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"], process_group=0)
            (self.folder / "held").write_text(f"{own.pid}\n")
            time.sleep(1e6)
        if word == "locked":
            with machine_lock():
                pass
        if word == "turn":
            with Turns(self.folder / "gpu") as turns, turns.taken():
                pass
        if word == "fails" or (word == "fails once" and not before):
            raise MachineError("the driver's\nown words")
        if word == "ends its actor" and not before:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1e6)
        if word == "environment":
            return (
                "a token" if any(os.environ[name] for name in os.environ if name.startswith("RAY_AUTH")) else "no token"
            )
        if word == "no":
            raise UserError("no such word")
        if word == "broken":
            raise RuntimeError("the driver's")
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")
