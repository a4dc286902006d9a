"""Files of a KernelBench checkout as a kind of task."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from cuda_l2.kernelbench.arms import ModelBaselines
from cuda_l2.kernelbench.cases import ForeignCases
from cuda_l2.kernelbench.checkout import effort_for, foreign, read
from cuda_l2.kernelbench.opened import ForeignCase
from cuda_l2.records import Operation, Task
from cuda_l2.tasks.cases import Cases
from cuda_l2.tasks.kinds import FileKind, Home
from cuda_l2.tasks.words import limits_words, shown

REFERENCE_PROCESSES = 2


class KernelBenchFiles(FileKind):
    """Tasks whose reference is a file's Model, in a sandbox."""

    single_launches = False  # the Model runs in a process of its own, where they cannot be traced
    reference_processes = REFERENCE_PROCESSES

    def cases(self, task: Operation, seed: int, home: Home = Home()) -> Cases:
        return ForeignCases(task, seed, home.device, home.cache_bytes)

    def read(self, text: str, target: str, checkout: Path | None) -> Task:
        return read(text, checkout, effort_for(gpu=target == "cuda"))

    def text(self, task: Task) -> str:
        return foreign(task).file.text

    def host_baselines(self, task: Task, threads: int) -> ModelBaselines:
        return ModelBaselines(task, threads)

    def device_baselines(self, task: Task) -> Any:
        from cuda_l2.kernelbench.cuda_arms import CudaModelBaselines  # noqa: PLC0415 - needs packages of CUDA

        return CudaModelBaselines(task)

    def tensor_lines(self, task: Task) -> list[str]:
        case = _shown_case(task)
        lines = []
        for tensor in task.inputs:
            number = f", always {case.numbers[tensor.name]}" if tensor.name in case.numbers else ""
            lines.append(f"- input {shown(tensor)}{number}")
        for tensor in task.weights:
            lines.append(f"- weight {shown(tensor)}, the module's `{case.keys[tensor.name]}`")
        return lines + [f"- output {shown(tensor)}" for tensor in task.outputs]

    def tolerance_words(self, task: Task) -> str:
        return f"on the file's own inputs: {limits_words(task.outputs, _shown_case(task).bounds)}"


@lru_cache(maxsize=4)
def _shown_case(task: Task) -> ForeignCase:
    """One for every process: what is said of a task does not change."""
    return foreign(task).file.case(seed=0, sizes=dict(task.sizes))


KIND = KernelBenchFiles()
