"""What the author of a kernel must know of a task: its tensors, the values in them, how exact results must be."""

from collections.abc import Mapping, Sequence
from functools import cache

from cuda_l2.contract.expressions import evaluate
from cuda_l2.records import SHORT_DTYPES, Accumulate, Gemm, Layout, Operation, Tensor
from cuda_l2.tasks._base import definition
from cuda_l2.tasks.tolerance import Bounds, bounds
from cuda_l2.tasks.values import Domain, Values

SMALL_BYTES, SMALL_FLOPS = 4 << 20, 1 << 30
"""Up to this the tolerance is computed at the task's own sizes, else at those for a CPU."""
_DOMAINS = {
    Domain.REAL: "real numbers",
    Domain.POSITIVE: "numbers above 0",
    Domain.UNIT: "numbers from 0 up to 1",
    Domain.PROBABILITIES: "probabilities along the last dimension",
    Domain.LOG_PROBABILITIES: "logarithms of probabilities along the last dimension",
    Domain.DEFINITE: "symmetric positive definite matrices",
    Domain.TRIANGULAR: "lower triangular matrices that can be inverted",
    Domain.BOOLEANS: "booleans",
}


def product_words(gemm: Gemm) -> str:
    """The instruction for a matrix product."""
    tn, fp32 = gemm.layout is Layout.TN, gemm.accumulate is Accumulate.FP32
    b = "N x K row-major, that is column-major B (layout tn)" if tn else "K x N row-major (layout nn)"
    sums = "fp32; sums in less precision fail" if fp32 else "fp16 or better"
    return (
        f"C = A B with M = {gemm.m}, N = {gemm.n}, K = {gemm.k}. A is M x K row-major, B is {b}, C is M x N row-major;"
        f" all {SHORT_DTYPES[gemm.dtype]}. Products are summed in {sums}. {gemm.flops:,} floating-point operations,"
        f" {gemm.bytes:,} bytes that must move. The kernel is timed for this shape alone and need serve no other."
    )


def tensor_lines(task: Operation) -> list[str]:
    """Each tensor's name, part, type, shape and values, a line each."""
    known = definition(task.name)
    lines = []
    for tensor in task.inputs:
        lines.append(f"- input {shown(tensor)}, {_values(known.inputs[tensor.name], task)}")
    for tensor in task.weights:
        values = _values(known.weights[tensor.name], task)
        lines.append(f"- weight {shown(tensor)}, {values}, the same from call to call")
    return lines + [f"- output {shown(tensor)}" for tensor in task.outputs]


@cache
def tolerance_words(task: Operation) -> str:
    """How far each output may be off, in figures for usual values."""
    known = definition(task.name)
    small = task.bytes <= SMALL_BYTES and task.flops <= SMALL_FLOPS
    shown = task if small else known.task(known.cpu, task.dtype)
    found = bounds(known.bind(dict(shown.sizes)), known.draw(shown, 0))
    at = "at these sizes" if small else f"at {sizes_words(dict(shown.sizes))}"
    return f"on normal numbers {at}: {limits_words(task.outputs, found)}"


def limits_words(outputs: Sequence[Tensor], limits: Sequence[Bounds]) -> str:
    """What outputs may be off by."""
    said = []
    for tensor, limit in zip(outputs, limits, strict=True):
        if limit.dtype.is_floating_point:
            said.append(f"`{tensor.name}` RMS error {limit.rms_allowed:.1e}, largest error {limit.max_allowed:.1e}")
        else:
            said.append(f"`{tensor.name}` equal, but where rounding decides")
    return "; ".join(said)


def sizes_words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in sizes.items())


def shown(tensor: Tensor) -> str:
    """A tensor's name, type and shape."""
    return f"`{tensor.name}`: {tensor.dtype} [{', '.join(map(str, tensor.shape))}]"


def _values(values: Values, task: Operation) -> str:
    if values.domain is Domain.INTEGERS:
        most = max(values.least + 1, evaluate(values.below, dict(task.sizes))) - 1
        return f"whole numbers from {values.least} to {most}"
    return _DOMAINS[values.domain]
