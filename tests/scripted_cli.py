"""`cuda-l2` in a process of its own, as from a shell, with scripted times: other work on the machine changes nothing."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as commands have it before torch loads

import chance
import kept_baselines
import scripted_times

from cuda_l2 import cli

if __name__ == "__main__":
    chance.install(setattr)
    scripted_times.install(setattr)
    kept_baselines.install(setattr)
    cli.main()
