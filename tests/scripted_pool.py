"""A process of a pool with scripted times. Where the file that POOL_DIES names is there it is killed, once, while it
judges; it hangs instead where the file says so. A file of its pid in the folder POOL_PIDS says that it runs.
"""

import os
import signal
import time
from pathlib import Path

import kept_baselines
import scripted_times

from cuda_l2.evaluator import Evaluator
from cuda_l2.runs import pool_worker

if __name__ == "__main__":
    scripted_times.install(setattr)
    kept_baselines.install(setattr)
    dies, judge = Path(os.environ.get("POOL_DIES", "/nowhere")), Evaluator.judge

    def judged(evaluator, *arguments, **named):
        trial = judge(evaluator, *arguments, **named)
        if dies.exists() and trial.timing:
            while dies.read_text() == "hangs":
                time.sleep(1e6)
            dies.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return trial

    Evaluator.judge = judged
    if "POOL_PIDS" in os.environ:
        (Path(os.environ["POOL_PIDS"]) / str(os.getpid())).touch()
    pool_worker.main()
