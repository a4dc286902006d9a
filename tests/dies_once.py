"""`cuda-l2` that is killed right after a line of results was stored, once for each --out.

    python dies_once.py TOLD COUNT COMMAND ...

TOLD: a file that gets every line that was acknowledged. COUNT: lines of a results file after which the kill comes.
"""

import os
import signal
import sys
from pathlib import Path

import chance
import kept_baselines
import scripted_times

from cuda_l2 import cli
from cuda_l2.system.lines import LinesFile

if __name__ == "__main__":
    chance.install(setattr)
    scripted_times.install(setattr)
    kept_baselines.install(setattr)
    told, count = Path(sys.argv[1]), int(sys.argv[2])
    sys.argv = ["cuda-l2", *sys.argv[3:]]
    out = Path(sys.argv[sys.argv.index("--out") + 1])
    died, stored = out / "died", [0]
    append = LinesFile.append

    def appended(file: LinesFile, text: str) -> None:
        append(file, text)
        if file.path.parent != out:
            return
        with told.open("a") as lines:
            lines.write(text + "\n")
        stored[0] += 1
        if stored[0] == count and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    LinesFile.append = appended
    cli.main()
