"""Tasks by their texts: matrix products, definitions of our own, files of others. docs/tasks.md says how to add one."""

import operator
from numbers import Number
from pathlib import Path

from cuda_l2.records import Gemm, Operation, Task
from cuda_l2.system.errors import UserError
from cuda_l2.system.values import short
from cuda_l2.tasks.optional import KERNELBENCH as KERNELBENCH
from cuda_l2.tasks.optional import is_foreign as is_foreign

TaskLike = str | Task | tuple[int, int, int]
"""A task as a Python caller gives it."""


def read(given: object, target: str = "cpu") -> Task:
    """A task as a Python caller gives it: a record, its text, or M, N and K. UserError where it can be none."""
    if isinstance(given, Gemm | Operation):
        return given
    if isinstance(given, str):
        if "\n" in given.strip():
            raise UserError(
                f"a source stands where the task belongs: give the source first; the task is {short(given)}"
            )
        return parse(given, target)
    if sizes := _sizes(given):
        return Gemm(*sizes)
    raise UserError(
        "a task is a text as in '512x512x512:tn' or 'softmax:rows=64,columns=1000', a Gemm, or M, N and K as in"
        f" (512, 512, 512), not {short(given)}"
    )


def several(given: object, target: str = "cpu") -> list[Task] | None:
    """The tasks of a list or tuple, each as `read` takes it; None where the whole is one task, or none."""
    if not isinstance(given, list | tuple) or any(isinstance(each, Number) for each in given) or _sizes(given):
        return None
    if not given:
        raise UserError("no task is given: write one as in '512x512x512'")
    return [read(each, target) for each in given]


def _sizes(given: object) -> tuple[int, int, int] | None:
    """M, N and K where it is three whole numbers, also of NumPy's or torch's."""
    listed = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(listed, list | tuple) or len(listed) != len("MNK"):
        return None
    try:
        m, n, k = map(operator.index, listed)
    except TypeError:
        return None
    return m, n, k


def parse(text: str, target: str = "cpu", checkout: Path | None = None) -> Task:
    """`512x512x512:tn` as a matrix product, `softmax:rows=64:float16` as one of our own tasks at these sizes.

    target: cpu or cuda, for the sizes that are left out, and for where a file's reference runs. checkout: folder of a
    KernelBench checkout, for tasks as `kernelbench/level1/19`, whose file is run in its sandbox.
    """
    if text.strip()[:1].isdigit():
        return Gemm.parse(text)
    # torch loads only where it is needed
    from cuda_l2.tasks._base import definition  # noqa: PLC0415
    from cuda_l2.tasks.kinds import file_kind  # noqa: PLC0415

    if kind := file_kind(text):
        return kind.read(text, target, checkout)
    name, revision, sizes, dtype = Operation.read_identity(text.strip())
    if revision:
        raise UserError(f"{text!r}: tasks of our own have no revision")
    try:
        known = definition(name)
    except UserError as error:
        raise UserError(f"{text!r} is no shape, as 512x512x512:tn is, and {error}") from None
    return known.task(sizes, dtype, target)


def identity(text: str, target: str = "cpu") -> Task:
    """The same, to look up what is kept of it; a task of KernelBench by its whole text, without its file or tensors."""
    if "@" not in text:
        return parse(text, target)
    name, revision, sizes, dtype = Operation.read_identity(text.strip())
    return Operation(name, tuple(sizes.items()), dtype, revision)


def describe(task: Task) -> str:
    """The instruction of a task, as its kind has it. UserError where nothing is known of the task."""
    from cuda_l2.tasks.kinds import kind_of  # noqa: PLC0415

    return kind_of(task).describe(task)
