"""A process of a pool with scripted times. Where the file that POOL_DIES names is there it is killed, once, while it
judges. Where the file has a text it hangs instead, or is killed by each task or source that holds the text. A file of
its pid in the folder POOL_PIDS, with its parent's name, says that it runs.
"""

import os
import signal
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as commands have it before torch loads

import chance
import kept_baselines
import scripted_times

from cuda_l2.evaluator import Evaluator
from cuda_l2.runs import pool_worker
from cuda_l2.system import process_tree

if __name__ == "__main__":
    chance.install(setattr)
    scripted_times.install(setattr)
    kept_baselines.install(setattr)
    dies, judge = Path(os.environ.get("POOL_DIES", "/nowhere")), Evaluator.judge

    def judged(evaluator, candidate, *arguments, **named):
        trial = judge(evaluator, candidate, *arguments, **named)
        text = dies.read_text() if dies.exists() else None
        while text == "hangs":
            time.sleep(1e6)
        if text == "" and trial.timing:
            dies.unlink()
        if (text == "" and trial.timing) or (text and text in f"{evaluator.task} {candidate.source}"):
            os.kill(os.getpid(), signal.SIGKILL)
        return trial

    Evaluator.judge = judged
    if "POOL_PIDS" in os.environ:
        (Path(os.environ["POOL_PIDS"]) / str(os.getpid())).write_text(process_tree.name_of(os.getppid()))
    pool_worker.main()
