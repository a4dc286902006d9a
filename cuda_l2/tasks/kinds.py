"""The ways in which tasks are defined: matrix products, definitions of our own, and files of others."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cuda_l2.records import Accumulate, Gemm, Layout, Operation, Task
from cuda_l2.system.text import fenced
from cuda_l2.tasks._base import definition
from cuda_l2.tasks.cases import CACHE_BYTES, Cases, OwnCases
from cuda_l2.tasks.optional import is_foreign, load_kernelbench
from cuda_l2.tasks.products import CpuReferences, CudaReferences, ProductCases
from cuda_l2.tasks.values import Distribution, distributions
from cuda_l2.tasks.words import product_words, reference_text, sizes_words, tensor_lines, tolerance_words

HOST_COPIES = 40
"""Most copies of a task's tensors in fp32 that checking and timing on the CPU keep at once: cases, references in fp64,
the arena."""
OF_TENSORS = ("shape", "device", "dtype", "to", "nn", "functional", "linalg", "mT", "flatten", "transpose", "values")
"""What references call beside computing."""
Libraries = Callable[[Gemm, torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
"""What a GPU's libraries compute for A and B, M x N each."""
Features = tuple[tuple[int, int, int], tuple[float, float, float]]
"""Three sizes that matter most, and three marks of what else is computed, 0 or 1."""


@dataclass(frozen=True)
class Home:
    """Where tensors lie and references run. libraries: of a GPU, for matrix products."""

    device: str = "cpu"
    cache_bytes: int = CACHE_BYTES
    libraries: Libraries | None = None


class Kind(ABC):
    """What is known of a task by the way in which it is defined. Its methods get tasks of this kind alone."""

    single_launches = True
    """Whether single launches of its baselines can be timed on a GPU."""
    known_by_text = True
    """Whether another process knows the task by its text alone."""
    reference_processes = 0
    """Processes on a GPU that hold the task's tensors beside ours."""

    @abstractmethod
    def cases(self, task: Any, seed: int, home: Home = Home()) -> Cases:
        """What candidates are judged on."""

    def host_bytes(self, task: Task) -> int:
        """About what checking and timing on the CPU take of the memory, workspaces apart."""
        return HOST_COPIES * task.bytes

    @abstractmethod
    def describe(self, task: Any) -> str:
        """The instruction: what a kernel is to compute, and how exactly, in the words that a model is given."""

    @abstractmethod
    def policy_features(self, task: Any) -> Features:
        """What a schedule policy is shown of a task."""


class Products(Kind):
    """Matrix products."""

    def cases(self, task: Gemm, seed: int, home: Home = Home()) -> Cases:
        return ProductCases(task, seed, CudaReferences(home.libraries) if home.libraries else CpuReferences())

    def host_bytes(self, task: Task) -> int:
        """The arena, private copies in the task's type and in fp32, baselines' buffers, references in fp64."""
        given, outputs = (sum(tensor.elements for tensor in group) for group in (task.given, task.outputs))
        return 30 * given + 60 * outputs

    def describe(self, task: Gemm) -> str:
        return product_words(task)

    def policy_features(self, task: Gemm) -> Features:
        marks = float(task.layout is Layout.TN), float(task.accumulate is Accumulate.FP16), 1.0
        return (task.m, task.n, task.k), marks


class OperationKind(Kind):
    """Tasks with a reference in PyTorch. what: what its text is, for the instruction."""

    what: str

    @abstractmethod
    def text(self, task: Operation) -> str:
        """The reference, as Python."""

    @abstractmethod
    def names(self, task: Operation) -> list[str]:
        """What the task and its like are called, word by word."""

    @abstractmethod
    def sizes_words(self, task: Operation) -> str:
        """Which sizes the text is for."""

    @abstractmethod
    def tensor_lines(self, task: Operation) -> list[str]:
        """Each tensor's name, part, type, shape and values, a line each."""

    @abstractmethod
    def tolerance_words(self, task: Operation) -> str:
        """How far each output may be off, in figures for usual values."""

    def describe(self, task: Operation) -> str:
        text = self.text(task)
        work = f"{task.flops:,} floating-point operations, " if task.flops else ""
        others = ", ".join(each.words for each in distributions(task.dtype) if each is not Distribution.NORMAL)
        return "\n\n".join(
            (
                f"{task}: {self.what}",
                fenced(text, "python", len(text)),
                "Tensors, all row-major and without gaps:\n\n" + "\n".join(self.tensor_lines(task)),
                f"{self.sizes_words(task)}. {work}{task.bytes:,} bytes that must move. The kernel is timed at"
                " these sizes alone. A contract that names its dimensions must be right at every size that it takes;"
                " one with numbers in their place serves these sizes alone.",
                f"Tolerance: about PyTorch's own error in this type. Allowed {self.tolerance_words(task)}."
                f" Checked as well, against PyTorch's own error on them: numbers {others}. On these a long sum in one"
                " chain, or a rounded mean that is subtracted, can be too inexact. Infinities and NaN come out as"
                " PyTorch has them; sums in less precision than fp32 fail.",
            )
        )

    def code_words(self, task: Operation) -> str:
        """Words of the instruction that code has too: the task's names, and what its reference calls."""
        words = [*self.names(task), *re.findall(r"\.([A-Za-z_]\w+)", self.text(task))]
        return " ".join(word for word in dict.fromkeys(words) if word not in OF_TENSORS)

    def policy_features(self, task: Operation) -> Features:
        """Rows and columns of the first tensor, and how much there is beside it."""
        first = task.given[0]
        columns = max(1, first.shape[-1] if first.shape else 1)
        sizes = max(1, first.elements // columns), columns, max(1, task.bytes // max(1, first.bytes))
        return sizes, (float(task.dtype == "float16"), float(task.dtype == "bfloat16"), 0.0)


class Definitions(OperationKind):
    """Tasks of our own."""

    what = (
        "compute what this PyTorch function returns. It takes the tensors, and sizes that it names, by name; what it"
        " returns are the outputs in their order."
    )

    def cases(self, task: Operation, seed: int, home: Home = Home()) -> Cases:
        return OwnCases(task, seed, home.device, home.cache_bytes)

    def text(self, task: Operation) -> str:
        return reference_text(task.name)

    def names(self, task: Operation) -> list[str]:
        return [*task.name.split("_"), *definition(task.name).group.split()]

    def sizes_words(self, task: Operation) -> str:
        return f"Sizes: {sizes_words(dict(task.sizes))}"

    def tensor_lines(self, task: Operation) -> list[str]:
        return tensor_lines(task)

    def tolerance_words(self, task: Operation) -> str:
        return tolerance_words(task)


class FileKind(OperationKind):
    """Tasks that are files of others; what one is takes its checkout."""

    known_by_text = False
    what = (
        "compute what the forward of this file's Model returns, a task of KernelBench. The module is as its constructor"
        " makes it from get_init_inputs(), in training mode; inputs are forward's parameters, weights the module's"
        " parameters and buffers, outputs what forward returns, in order, a complex tensor as real and imaginary"
        " parts in a last dimension of 2. Buffers that the module changes stay as they are."
    )

    @abstractmethod
    def read(self, text: str, target: str, checkout: Path | None) -> Task:
        """The task that a text names, its file tried in a sandbox; UserError where it cannot be one.

        target: cpu or cuda, where its reference runs.
        """

    @abstractmethod
    def host_baselines(self, task: Task, threads: int) -> Any:
        """The file's Model on the CPU as `measure.torch_baselines.HostBaselines`."""

    @abstractmethod
    def device_baselines(self, task: Task) -> Any:
        """The file's Model on a GPU as `measure.task_memory.CudaTaskBaselines`."""

    def names(self, task: Operation) -> list[str]:
        return task.name.rpartition("/")[2].strip("0123456789_").lower().split("_")

    def sizes_words(self, task: Operation) -> str:
        return "The file's numbers" + (
            f", but here {sizes_words(dict(task.sizes))}" if task.sizes else " as they stand"
        )


_PRODUCTS, _DEFINITIONS = Products(), Definitions()


def kind_of(task: Task) -> Kind:
    """How a task is defined."""
    return _PRODUCTS if task.product else operation_kind(task)


def operation_kind(task: Operation) -> OperationKind:
    """The same of a task that is no matrix product."""
    return file_kind(task.name) or _DEFINITIONS


def file_kind(name: str) -> FileKind | None:
    """The kind of the files that a task's name or text is of; None where it is of none."""
    kind: FileKind | None = load_kernelbench("kind").KIND if is_foreign(name) else None
    return kind
