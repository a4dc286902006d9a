"""Launches CUDA candidates in a process of their own, under a tool of NVIDIA's: the sanitizer or the profiler."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.tensors import Tensors, stored
from cuda_l2.records import Task, to_json
from cuda_l2.system import sandbox, scratch

MAIN = "cuda_l2.machine.cuda.alone_main"


@dataclass(frozen=True, slots=True)
class Job:
    """What to launch: on tensors from a file, or on standard normal numbers from a seed."""

    cubin: str
    plan: Plan
    task: Task
    launches: int
    seed: int = 0
    fills_scratch: bool = True  # garbage of ours before each launch; else what memory held when it was allocated
    given: str = ""  # path of a file: the bytes of inputs and weights, in the task's order; normal numbers where empty


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended. A process that died has neither digests nor a word on why."""

    status: int | None  # of the tool's process; None where it outran its time
    output: str  # the tool's
    digests: tuple[tuple[str, ...], ...] = ()
    """Digests of the outputs, for each job that was done and each of its launches."""
    refused: str = ""  # a job cannot be launched as its contract says; it was the last
    fault: str = ""  # what the driver said
    machine: str = ""  # the same, where no candidate can be the cause


def run(tool: Sequence[str], jobs: Sequence[Job], folder: Path, timeout_s: float) -> Ended:
    """Run jobs, one after the other, in this folder under a tool, given as the beginning of a command."""
    texts = [folder / name for name in ("jobs.jsonl", "result.json", "log")]
    texts[0].write_text("\n".join(to_json(job) for job in jobs))
    command = [*tool, sys.executable, "-P", "-m", MAIN, str(texts[0]), str(texts[1])]
    with texts[2].open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, process_group=0
        )
        status = sandbox.finish(process, timeout_s)
    result = json.loads(texts[1].read_text()) if texts[1].exists() else {}
    digests = tuple(tuple(found) for found in result.pop("digests", ()))
    return Ended(status, texts[2].read_text(errors="replace"), digests, **result)


@contextmanager
def given_file(task: Task, tensors: Tensors | None) -> Iterator[str]:
    """Path of a file with the bytes of inputs and weights, for a process that launches alone; empty without tensors."""
    if tensors is None:
        yield ""
        return
    with scratch.folder() as folder:
        path = folder / "given"
        with path.open("wb") as file:
            for tensor in task.given:
                file.write(stored(tensors[tensor.name].cpu(), tensor).numpy().tobytes())
        yield str(path)
