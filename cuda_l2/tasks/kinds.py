"""The ways in which tasks are defined: matrix products, definitions of our own, and files of others.

A part of the package that makes tasks of files registers in FILES, and is imported when a task of its name is asked
for; nothing else knows it.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cuda_l2.records import Gemm, Operation, Task
from cuda_l2.tasks.cases import CACHE_BYTES, Cases, OwnCases
from cuda_l2.tasks.products import CpuReferences, CudaReferences, ProductCases

FILES = {"kernelbench": "cuda_l2.kernelbench.kind"}
"""Modules with a KIND, by what the names of their tasks begin with, as in kernelbench/level1/19_ReLU."""
HOST_COPIES = 40
"""Of a task's tensors in fp32, at most, that checking and timing on the CPU keep at once: cases, references in fp64,
the arena."""
Libraries = Callable[[Gemm, torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
"""What a GPU's libraries compute for A and B, M x N each."""


class Kind(ABC):
    """What is known of a task by the way in which it is defined."""

    single_launches = True
    """Whether single launches of its baselines can be timed on a GPU."""
    known_by_text = True
    """Whether another process knows the task by its text alone."""
    reference_processes = 0
    """Processes on a GPU that hold the task's tensors beside ours."""

    @abstractmethod
    def cases(
        self,
        task: Task,
        seed: int,
        device: str = "cpu",
        cache_bytes: int = CACHE_BYTES,
        libraries: Libraries | None = None,
    ) -> Cases:
        """What candidates are judged on. device: where tensors lie. libraries: of a GPU, for matrix products."""

    def host_bytes(self, task: Task) -> int:
        """About what checking and timing on the CPU take of the memory, workspaces apart."""
        return HOST_COPIES * task.bytes


class Products(Kind):
    """Matrix products."""

    def cases(
        self,
        task: Task,
        seed: int,
        device: str = "cpu",
        cache_bytes: int = CACHE_BYTES,
        libraries: Libraries | None = None,
    ) -> Cases:
        assert isinstance(task, Gemm)
        return ProductCases(task, seed, CudaReferences(libraries) if libraries else CpuReferences())

    def host_bytes(self, task: Task) -> int:
        """The arena, private copies in the task's type and in fp32, baselines' buffers, references in fp64."""
        given, outputs = (sum(tensor.elements for tensor in group) for group in (task.given, task.outputs))
        return 30 * given + 60 * outputs


class Definitions(Kind):
    """Tasks of our own."""

    def cases(
        self,
        task: Task,
        seed: int,
        device: str = "cpu",
        cache_bytes: int = CACHE_BYTES,
        libraries: Libraries | None = None,
    ) -> Cases:
        assert isinstance(task, Operation)
        return OwnCases(task, seed, device, cache_bytes)


class FileKind(Kind):
    """Tasks that are files of others; what one is takes its checkout."""

    known_by_text = False

    @abstractmethod
    def read(self, text: str, target: str, checkout: Path | None) -> Task:
        """The task that a text names, its file tried in a sandbox; UserError where it cannot be one.

        target: cpu or cuda, where its reference runs.
        """

    @abstractmethod
    def text(self, task: Task) -> str:
        """The file's text."""

    @abstractmethod
    def host_baselines(self, task: Task, threads: int) -> Any:
        """The file's Model on the CPU as `measure.torch_baselines.HostBaselines`."""

    @abstractmethod
    def device_baselines(self, task: Task) -> Any:
        """The file's Model on a GPU as `measure.task_memory.CudaTaskBaselines`."""

    @abstractmethod
    def tensor_lines(self, task: Task) -> list[str]:
        """Each tensor's name, part, type, shape and values, a line each."""

    @abstractmethod
    def tolerance_words(self, task: Task) -> str:
        """How far each output may be off, in figures for usual values."""


_PRODUCTS, _DEFINITIONS = Products(), Definitions()


def kind_of(task: Task) -> Kind:
    """How a task is defined."""
    return _PRODUCTS if isinstance(task, Gemm) else file_kind(task.name) or _DEFINITIONS


def file_kind(name: str) -> FileKind | None:
    """The kind of the files that a task's name or text is of; None where it is of none."""
    module = FILES.get(name.strip().partition("/")[0])
    if module is None:
        return None
    kind: FileKind = importlib.import_module(module).KIND
    return kind
