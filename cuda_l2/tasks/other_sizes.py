"""Sizes of a task that nobody was shown: odd ones, multiples, a few elements, and one size many times as large."""

import contextlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from cuda_l2.records import Operation
from cuda_l2.system.errors import UserError
from cuda_l2.tasks._base import LARGER, SMALLER, definition

MULTIPLES = {"cpu": (1,), "cuda": (1, 2, 4, 8, 32)}
"""What other sizes are multiples of, larger and smaller ones: a GPU's kernel that loads vectors may refuse odd ones."""
MOST_BYTES, MOST_FLOPS = 1 << 26, 1 << 32
"""Tasks that would take more at larger sizes than shown are tried at larger ones than the CPU's."""
WHOLE_MULTIPLES, WHOLE_BYTES, WHOLE_FLOPS = (256, 64, 16, 4), 1 << 22, 1 << 28
"""On a CPU all sizes are multiples of the first of these with which they take no more: nothing is left over."""
TINIEST, NEVER_TINY = 8, ("attention",)
"""Sizes smaller than the first, one of them 1: less than a vector, and nothing for most threads. The groups of tasks
that have none: a mask that leaves no key is likely there, and what attention gives then is rounding."""
FAR_FACTORS = (5, 7, 9)
"""Odd: on a GPU the size divides by the same powers of two then, and a contract that takes the one takes both."""
FAR_BYTES, FAR_FLOPS, FAR_MULTIPLE = 1 << 24, 1 << 31, 32
"""Most that tasks with one size so much larger may take; where the others are the CPU's, these are rounded up."""
FAR_COUNT, FAR_SHARE, FAR_WHOLE = 1 << 17, 8, 1 << 12
"""On a CPU: the size is larger than the first, and once a multiple of the third; the others are at most the CPU's
divided by the second."""
STEPS = 1 << 11
"""Most that a size becomes which the reference goes through step by step."""


def others(task: Operation, device: str, rng: np.random.Generator) -> tuple[Operation, ...]:
    """Larger than shown, where that stays cheap, and smaller than both what is shown and the CPU's.

    First odd ones, then on a GPU multiples of more and more, on a CPU whole multiples and a few elements.
    """
    known, shown = definition(task.name), dict(task.sizes)
    least = {name: min(shown[name], size) for name, size in known.cpu.items() if name not in known.rigid}
    rigid = {name: shown[name] for name in known.rigid}
    found = []
    for multiple in MULTIPLES[device]:
        for factors, bases in ((LARGER, (shown, rigid)), (SMALLER, (rigid | least, rigid))):
            drawn = (known.other_sizes(rng, factors, sizes=base, multiple=multiple) for base in bases)
            found += _first_affordable(task, drawn, MOST_BYTES, MOST_FLOPS)
    if device == "cpu":
        found += [*_whole(task, rigid), *_tiny(task, rng)]
    return tuple(dict.fromkeys(each for each in found if each != task))


def far(task: Operation, device: str, rng: np.random.Generator) -> tuple[Operation, ...]:
    """One size far larger than shown: on a GPU each in turn, on a CPU one that is drawn."""
    return (_far_on_a_gpu if device == "cuda" else _far_on_a_cpu)(task, rng)


def _far_on_a_gpu(task: Operation, rng: np.random.Generator) -> tuple[Operation, ...]:
    """One size several times as large as shown, which is more than the threads of a block, or what is in flight.

    The others are as shown; about the CPU's where that takes too much; the same of this one where that does too.
    """
    known, shown = definition(task.name), dict(task.sizes)
    free = [name for name in shown if name not in known.rigid]
    least = {name: min(shown[name], -(-known.cpu[name] // FAR_MULTIPLE) * FAR_MULTIPLE) for name in free}
    found = []
    for name in free:
        factor = int(rng.choice(FAR_FACTORS))
        bases = (shown, {**shown, **least, name: shown[name]}, {**shown, **least})
        drawn = ({**base, name: base[name] * factor} for base in bases)
        found += _first_affordable(task, drawn, FAR_BYTES, FAR_FLOPS)
    return tuple(dict.fromkeys(found))


def _far_on_a_cpu(task: Operation, rng: np.random.Generator) -> tuple[Operation, ...]:
    """One size, drawn, twice what 16 bits count, then the same size a multiple of `FAR_WHOLE`: the others small.

    Sizes that would take too much that way are passed over.
    """
    known, shown = definition(task.name), dict(task.sizes)
    free = [name for name in shown if name not in known.rigid]
    least = {name: min(shown[name], -(-known.cpu[name] // FAR_SHARE)) for name in free}
    for name in map(str, rng.permutation(free)):
        most = shown[name] * (((FAR_COUNT // shown[name] + 1) | 1) + 2 * int(rng.integers(3)))
        whole = FAR_WHOLE * int(rng.choice(FAR_FACTORS))
        if name == known.stepwise:
            most, whole = shown[name] * max(1, (STEPS // shown[name] - 1) | 1), STEPS
        drawn = [{**shown, **least, name: size} for size in (most, whole)]
        found = [_first_affordable(task, [sizes], FAR_BYTES, FAR_FLOPS) for sizes in drawn]
        if found[0]:
            return (*found[0], *found[1])
    return ()


def _whole(task: Operation, rigid: Mapping[str, int]) -> list[Operation]:
    """Multiples of a power of two, from what is shown or, where that takes too much, from the CPU's sizes on."""
    drawn = (
        {**{name: -(-size // multiple) * multiple for name, size in base.items()}, **rigid}
        for multiple in WHOLE_MULTIPLES
        for base in (dict(task.sizes), dict(definition(task.name).cpu))
    )
    return _first_affordable(task, drawn, WHOLE_BYTES, WHOLE_FLOPS)


def _tiny(task: Operation, rng: np.random.Generator) -> list[Operation]:
    """A few elements; none where the reference has no result then but zeros, as logarithms of a softmax of one."""
    known, shown = definition(task.name), dict(task.sizes)
    free = [name for name in shown if name not in known.rigid]
    if not free or known.group in NEVER_TINY:
        return []
    sizes = {
        **shown,
        **{name: min(shown[name], int(rng.integers(1, TINIEST))) for name in free},
        str(rng.choice(free)): 1,
    }
    given = replace(task, sizes=tuple(sizes.items()))
    # before a task is made of them, which logs what fails; a reference is anybody's code
    with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
        results = known.bind(sizes)(**known.draw(given, int(rng.integers(1 << 32))))
        if all(result.isfinite().all() and result.any() for result in results if result.is_floating_point()):
            return [known.task(sizes, task.dtype)]
    return []


def _first_affordable(
    task: Operation, drawn: Iterable[Mapping[str, int]], most_bytes: int, most_flops: int
) -> list[Operation]:
    """The task at the first of these sizes that go together and take no more than this; none where none do."""
    for sizes in drawn:
        with contextlib.suppress(UserError):
            found = definition(task.name).task(sizes, task.dtype)
            if found.bytes <= most_bytes and found.flops <= most_flops:
                return [found]
    return []
