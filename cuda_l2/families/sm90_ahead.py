"""sm90_wave's kernels with the weights' loads before the wait for the launch ahead: B is declared constant.

A family of its own and no choice of sm90_wave: its kernels are for callers who opted in. The source is sm90_wave.cu
with sm90_ahead_begin.cuh in place of sm90_wave_begin.cuh.
"""

import itertools
from collections.abc import Iterator
from typing import ClassVar

from cuda_l2.families import _sm90_wave_space as space
from cuda_l2.families._base import Schedule
from cuda_l2.families._sm90_wave_space import Shape
from cuda_l2.families.sm90_fitted import Fitted
from cuda_l2.machine._base import Target
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Gemm

FEW = 64
"""Most rows: beyond, a launch multiplies for longer than the launch ahead of it ends."""
BLOCKS = 2
"""Blocks a multiprocessor for which one choice of the ring leaves room: those of the next launch begin beside ours."""
ALONE = {"CM": 1, "CN": 1, "LOCAL": 0, "SL": 1}
"""Choices that are fixed: no loads are shared, and no blocks wait for one another."""


class Ahead(Fitted):
    """Few rows: the weights of the ring's stages are loaded before the launch ahead has ended."""

    name = "sm90_ahead"
    reads_ahead = True
    replaced: ClassVar = {"sm90_wave_begin.cuh": "sm90_ahead_begin.cuh"}

    def serves(self, gemm: Gemm, target: Target) -> bool:
        return gemm.m <= FEW and super().serves(gemm, target)

    def fits(self, name: str, value: int, chosen: dict[str, int], gemm: Gemm, target: CudaTarget) -> bool:
        if name in ALONE:
            return value == ALONE[name]
        if name == "PDL":
            return value > 0
        if name == "STAGES" and value > 1 and value == Shape(chosen).stages(target, BLOCKS):
            return True
        return super().fits(name, value, chosen, gemm, target)

    def ranked(self, gemm: Gemm, target: CudaTarget, count: int) -> list[tuple[int, ...]]:
        return list(itertools.islice(self._promising(gemm, target), count))

    def _promising(self, gemm: Gemm, target: CudaTarget) -> Iterator[tuple[int, ...]]:
        """Weights on the 64-row axis first, full rings first, dependents let in at the top."""
        tiles = sorted(space.tiles(gemm, target, fitted=True), key=lambda tile: (-tile.SWAP, tile.BM * tile.BN))
        for tile, ck, kb in itertools.product(tiles, (1, 2, 4, 8), (4, 2, 1)):
            shape = Shape({**tile._asdict(), "KB": kb, "CK": ck})
            for stages in (shape.stages(target), shape.stages(target, BLOCKS)):
                wanted = {**tile._asdict(), "KB": kb, **ALONE, "CK": ck, "COUNT": 0, "MINB": 1, "STAGES": stages}
                values = self.nearest({**wanted, "ORDER": 0, "PDL": 1, "EDGE": 1}, gemm, target)
                if {**self.named(values), **wanted} == self.named(values):
                    yield values

    def contract(self, schedule: Schedule) -> str:
        return super().contract(schedule).replace('arch = "sm_90a"', 'arch = "sm_90a"\nconstant = ["b"]', 1)


FAMILY = Ahead()
