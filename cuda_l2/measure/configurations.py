"""Configurations of cuBLASLt's algorithms beyond those that its heuristic returns: what may be set, draws, neighbours.

The library tells an algorithm's tiles, stages, splits, reductions, swizzles and custom options. It does not tell its
clusters and inner shapes: every one of cublasLt.h is tried. Most combinations do not exist; the library refuses those.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

NO_REDUCTION, COMPUTE_TYPE = 0, 2
"""Schemes of a split K that round no part of a sum to the output's type."""
SPLITS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96, 128)
LIBRARYS_SPLIT = -1
"""The library splits as it likes: what its heuristic returns for stream-K kernels."""
UNREAD = -1
"""In place of an attribute that this kind of algorithm does not have."""
LEAST_K = 64
"""The least K that a part of a split has."""
CLUSTERS = (0, *range(2, 52))
"""cublasLtClusterShape_t: automatic, then 1x1x1 to 1x15x1."""
INNER_SHAPES = tuple(range(5))
"""cublasLtMatmulInnerShape_t."""
MOST_CUSTOM = 255
"""Custom options above this are not tried."""
FIRST = 0.5
"""How often a draw takes an attribute's first value, the default; tiles and stages have none."""
Value = tuple[int, int] | int


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is set of an algorithm, in the library's own numbers; 0 is the default, of split_k 1."""

    id: int
    tile: int = 0
    stages: int = 0
    split_k: int = 1
    reduction: int = NO_REDUCTION
    swizzle: int = 0
    custom_option: int = 0
    inner_shape: int = 0
    cluster: int = 0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the library says may be set of one algorithm."""

    id: int
    tiles: tuple[int, ...]
    stages: tuple[int, ...]
    splits: bool
    reductions: int  # a mask of schemes
    swizzle: int  # the largest
    custom_option: int  # the largest


class Space:
    """All configurations of some algorithms for products with one K."""

    def __init__(self, algorithms: Sequence[Capabilities], k: int) -> None:
        self._values = {each.id: _values(each, k) for each in algorithms}

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self._values)

    def draw(self, ids: Sequence[int], rng: "np.random.Generator") -> Configuration:
        """A configuration of one of these algorithms."""
        chosen = ids[int(rng.integers(len(ids)))]
        drawn = Configuration(chosen)
        for name, values in self._values[chosen].items():
            first = name not in ("tile", "stages") and rng.random() < FIRST
            drawn = _with(drawn, name, values[0 if first else int(rng.integers(len(values)))])
        return drawn

    def neighbours(self, configuration: Configuration) -> Iterator[Configuration]:
        """All that differ from it in one attribute; a split and its reduction are one."""
        for name, values in self._values.get(configuration.id, {}).items():
            for value in values:
                changed = _with(configuration, name, value)
                if changed != configuration:
                    yield changed


def _values(algorithm: Capabilities, k: int) -> Mapping[str, Sequence[Value]]:
    """The values of every attribute, the default first."""
    splits: list[Value] = [(1, NO_REDUCTION)]
    if algorithm.splits and algorithm.reductions & COMPUTE_TYPE:
        parts = [count for count in SPLITS if k >= count * LEAST_K]
        splits += [(count, COMPUTE_TYPE) for count in (*parts, LIBRARYS_SPLIT)]
    return {
        "tile": algorithm.tiles or (0,),
        "stages": algorithm.stages or (0,),
        "split_k": splits,
        "swizzle": range(algorithm.swizzle + 1),
        "custom_option": range(min(algorithm.custom_option, MOST_CUSTOM) + 1),
        "inner_shape": INNER_SHAPES,
        "cluster": CLUSTERS,
    }


def _with(configuration: Configuration, name: str, value: Value) -> Configuration:
    if isinstance(value, tuple):
        return replace(configuration, split_k=value[0], reduction=value[1])
    return replace(configuration, **{name: value})
