"""Training on several GPUs of this machine: a process each, its rank, which accelerate joins to one run.

Each has a share of every batch. The first writes the model and the checkpoints and says what goes on; each rank of a
stage with rewards judges its own answers on its own GPU.
"""

import datetime
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cuda_l2.runs.workers import own_arguments
from cuda_l2.system import process_tree, variables
from cuda_l2.system.errors import UserError
from cuda_l2.system.paths import CLI

RANK, COUNT = "RANK", "WORLD_SIZE"
"""Variables that accelerate reads too."""
MEETING = "CUDA_L2_RANKS"
"""Variable with the file by which ranks find one another: torch's own server would listen on all addresses."""
PATIENCE = datetime.timedelta(hours=12)
"""A rank waits for the gradients of others, who may judge meanwhile."""


def rank() -> int:
    """This process's number; 0 where it trains alone, whatever a cluster's shell says."""
    return int(os.environ[RANK]) if MEETING in os.environ else 0


def count() -> int:
    """Number of processes that train together."""
    return int(os.environ[COUNT]) if MEETING in os.environ else 1


def join() -> None:
    """Find the other ranks, if this process is one."""
    if MEETING not in os.environ:
        return
    import torch  # noqa: PLC0415 - options must be read in no time

    torch.distributed.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"file://{os.environ[MEETING]}",
        timeout=PATIENCE,
        world_size=count(),
        rank=rank(),
    )


def launch(gpus: Sequence[str], program: Sequence[str] = CLI) -> None:
    """Run this command, but for --gpus, as a rank on each GPU until all have ended.

    UserError where one fails: the others are ended, as by an interrupt, and the same command goes on from the last
    checkpoint.
    """
    arguments = own_arguments(sys.argv[1:], {"--gpus": ""})
    common = {COUNT: str(len(gpus)), "LOCAL_WORLD_SIZE": str(len(gpus)), "LOCAL_RANK": "0"}  # each sees one GPU
    common |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    with selectors.DefaultSelector() as ends, tempfile.TemporaryDirectory() as folder:
        common[MEETING] = str(Path(folder) / "ranks")
        for number, gpu in enumerate(gpus):
            process = subprocess.Popen(
                [*program, *arguments],
                env=variables.given() | common | {RANK: str(number), "CUDA_VISIBLE_DEVICES": gpu},
                stdin=subprocess.DEVNULL,
                stdout=None if number == 0 else subprocess.DEVNULL,
                process_group=0,  # Ctrl-C ends it from here
                preexec_fn=process_tree.end_with_parent,  # noqa: PLW1509 - there is one thread
            )
            processes.append(process)
            ends.register(os.pidfd_open(process.pid), selectors.EVENT_READ, process)
        try:
            while ends.get_map():
                for key, _ in ends.select():
                    ends.unregister(key.fd)
                    os.close(key.fd)
                    if status := key.data.wait():
                        gpu = gpus[processes.index(key.data)]
                        raise UserError(
                            f"the process on GPU {gpu} ended with status {status}, and the others with it; the same"
                            " command goes on from the last checkpoint"
                        )
        finally:  # one that waits for another's gradients hears nothing else; checkpoints stay whole
            for process in processes:
                process.kill()
                process.wait()
