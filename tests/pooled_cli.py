"""`cuda-l2` in a process of its own with scripted times, where two processes of a pool stand in for those of two GPUs."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as commands have it before torch loads

import chance
import kept_baselines
import scripted_times

from cuda_l2 import cli
from cuda_l2.runs import on_ray, pool, workers

if __name__ == "__main__":
    chance.install(setattr)
    scripted_times.install(setattr)
    kept_baselines.install(setattr)
    workers.gpus = lambda *_, **named: ["0", "1"]
    on_ray.require_gpus = lambda *_: None
    pool.MAIN = "scripted_pool"
    cli.main()
