"""What the author of a kernel must be told of a task: its tensors, what stands in them, how exact results are to be."""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

from cuda_l2.contract.expressions import evaluate
from cuda_l2.kernelbench.checkout import foreign
from cuda_l2.kernelbench.opened import Case
from cuda_l2.records import Operation, Tensor
from cuda_l2.tasks import is_foreign
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


def tensor_lines(task: Operation) -> list[str]:
    """Each tensor's name, part, type, shape and values, a line each."""
    if is_foreign(task.name):
        return _foreign_lines(task)
    known = definition(task.name)
    lines = []
    for tensor in task.inputs:
        lines.append(f"- input {_shown(tensor)}, {_values(known.inputs[tensor.name], task)}")
    for tensor in task.weights:
        values = _values(known.weights[tensor.name], task)
        lines.append(f"- weight {_shown(tensor)}, {values}, the same from call to call")
    return lines + [f"- output {_shown(tensor)}" for tensor in task.outputs]


@cache
def tolerance_words(task: Operation) -> str:
    """How far each output may be off, in figures for usual values."""
    if is_foreign(task.name):
        limits = _foreign_case(task).bounds
        return f"on the file's own inputs: {_limits(task.outputs, [limits[each.name] for each in task.outputs])}"
    known = definition(task.name)
    small = task.bytes <= SMALL_BYTES and task.flops <= SMALL_FLOPS
    shown = task if small else known.task(known.cpu, task.dtype)
    found = bounds(known.bind(dict(shown.sizes)), known.draw(shown, 0))
    at = "at these sizes" if small else f"at {sizes_words(dict(shown.sizes))}"
    return f"on normal numbers {at}: {_limits(task.outputs, found)}"


def _limits(outputs: Sequence[Tensor], limits: Sequence[Bounds]) -> str:
    said = []
    for tensor, limit in zip(outputs, limits, strict=True):
        if limit.dtype.is_floating_point:
            said.append(f"`{tensor.name}` RMS error {limit.rms_allowed:.1e}, largest error {limit.max_allowed:.1e}")
        else:
            said.append(f"`{tensor.name}` equal, but where rounding decides")
    return "; ".join(said)


def _foreign_lines(task: Operation) -> list[str]:
    """Of a task that comes from a file: whose values its own code draws."""
    case = _foreign_case(task)
    lines = []
    for tensor in task.inputs:
        number = f", always {case.numbers[tensor.name]}" if tensor.name in case.numbers else ""
        lines.append(f"- input {_shown(tensor)}{number}")
    for tensor in task.weights:
        lines.append(f"- weight {_shown(tensor)}, the module's `{case.keys[tensor.name]}`")
    return lines + [f"- output {_shown(tensor)}" for tensor in task.outputs]


@lru_cache(maxsize=4)
def _foreign_case(task: Operation) -> Case:
    """One for every process: what is said of a task does not change."""
    return foreign(task).file.case(seed=0, sizes=dict(task.sizes))


def sizes_words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in sizes.items())


def _shown(tensor: Tensor) -> str:
    return f"`{tensor.name}`: {tensor.dtype} [{', '.join(map(str, tensor.shape))}]"


def _values(values: Values, task: Operation) -> str:
    if values.domain is Domain.INTEGERS:
        most = max(values.least + 1, evaluate(values.below, dict(task.sizes))) - 1
        return f"whole numbers from {values.least} to {most}"
    return _DOMAINS[values.domain]
