"""The instruction: what a kernel is to compute, and how exactly, in the words that a model is given."""

import re

from cuda_l2.llm.templates import fenced
from cuda_l2.records import SHORT_DTYPES, Gemm, Operation, Task

_OF_TENSORS = ("shape", "device", "dtype", "to", "nn", "functional", "linalg", "mT", "flatten", "transpose", "values")
"""What references call beside computing."""
_FUNCTION = (
    "compute what this PyTorch function returns. It takes the tensors, and sizes that it names, by name; what it"
    " returns are the outputs in their order."
)
_MODULE = (
    "compute what the forward of this file's Model returns, a task of KernelBench. The module is as its constructor"
    " makes it from get_init_inputs(), in training mode; inputs are forward's parameters, weights the module's"
    " parameters and buffers, outputs what forward returns, in order. Buffers that the module changes stay as they are."
)


def describe_task(task: Task) -> str:
    """The instruction. UserError where nothing is known of the task."""
    return _product(task) if isinstance(task, Gemm) else _operation(task)


def code_words(task: Operation) -> str:
    """Words of the instruction that code has too: the task's name and group, and what its reference calls."""
    # torch loads only where it is needed
    from cuda_l2.tasks._base import definition  # noqa: PLC0415
    from cuda_l2.tasks.kinds import file_kind  # noqa: PLC0415
    from cuda_l2.tasks.reference_text import reference_text  # noqa: PLC0415

    if kind := file_kind(task.name):
        named, text = task.name.rpartition("/")[2].strip("0123456789_").lower().split("_"), kind.text(task)
    else:
        named, text = [*task.name.split("_"), *definition(task.name).group.split()], reference_text(task.name)
    words = [*named, *re.findall(r"\.([A-Za-z_]\w+)", text)]
    return " ".join(word for word in dict.fromkeys(words) if word not in _OF_TENSORS)


def _product(gemm: Gemm) -> str:
    b = "K x N row-major (layout nn)" if gemm.layout == "nn" else "N x K row-major, that is column-major B (layout tn)"
    sums = "fp32; sums in less precision fail" if gemm.accumulate == "fp32" else "fp16 or better"
    return (
        f"C = A B with M = {gemm.m}, N = {gemm.n}, K = {gemm.k}. A is M x K row-major, B is {b}, C is M x N row-major;"
        f" all {SHORT_DTYPES[gemm.dtype]}. Products are summed in {sums}. {gemm.flops:,} floating-point operations,"
        f" {gemm.bytes:,} bytes that"
        " must move. The kernel is timed for this shape alone and need serve no other."
    )


def _operation(task: Operation) -> str:
    # torch loads only where it is needed
    from cuda_l2.tasks.kinds import file_kind  # noqa: PLC0415
    from cuda_l2.tasks.reference_text import reference_text  # noqa: PLC0415
    from cuda_l2.tasks.words import sizes_words, tensor_lines, tolerance_words  # noqa: PLC0415

    work = f"{task.flops:,} floating-point operations, " if task.flops else ""
    if kind := file_kind(task.name):
        text, what, sizes = kind.text(task), _MODULE, "The file's numbers"
        sizes += f", but here {sizes_words(dict(task.sizes))}" if task.sizes else " as they stand"
    else:
        text, what, sizes = reference_text(task.name), _FUNCTION, f"Sizes: {sizes_words(dict(task.sizes))}"
    return "\n\n".join(
        (
            f"{task}: {what}",
            fenced(text, "python", len(text)),
            "Tensors, all row-major and without gaps:\n\n" + "\n".join(tensor_lines(task)),
            f"{sizes}. {work}{task.bytes:,} bytes that must move. The kernel is timed at"
            " these sizes alone. A contract that names its dimensions must be right at every size that it takes; one"
            " with numbers in their place serves these sizes alone.",
            f"Tolerance: about PyTorch's own error in this type. Allowed {tolerance_words(task)}. Large, small, sparse,"
            " constant, all positive and all negative inputs are checked as well; infinities and NaN come out as"
            " PyTorch has them; sums in less precision than fp32 fail.",
        )
    )
