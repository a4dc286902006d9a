"""sm90_ragged's kernels for few rows and column-major B whose rows are no multiples of 16 bytes: B is not copied.

A family of its own, which searches do not propose, as sm90_fitted. sm90_phases_pad.cuh says how B is read.
"""

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from cuda_l2.families import _sm90
from cuda_l2.families._base import Schedule, cdiv, element
from cuda_l2.families.sm90_ragged import PAD_THREADS, PER_THREAD, Ragged, block_threads, shared_bytes
from cuda_l2.machine._base import Target
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Gemm, Layout

FEW = 512
"""Most rows: A is copied once a phase."""
MOST_COLUMNS = 1 << 20
"""Numbers of columns and phases go to the kernel in one word."""
PHASES = "(2 + 2 * min(1, k % 4) + 4 * (k % 2))"
"""8 / gcd(k, 8), where k is no multiple of 8."""
PARTS = ("pad", "rows", "tiles", "column", "load", "whole")


class Phases(Ragged):
    """One launch copies A once a phase, moved; the other multiplies copy p of P by rows p, P + p, 2 P + p ... of B."""

    name = "sm90_phases"
    searched = False
    replaced: ClassVar = {f"sm90_ragged_{part}.cuh": f"sm90_phases_{part}.cuh" for part in PARTS}

    @property
    def source(self) -> Path:
        return Path(__file__).with_name("sm90_ragged.cu")

    def serves(self, gemm: Gemm, target: Target) -> bool:
        ragged = gemm.layout is Layout.TN and gemm.k % 8 != 0 and gemm.n % phases(gemm) == 0
        return ragged and gemm.m <= FEW and gemm.n < MOST_COLUMNS and super().serves(gemm, target)

    def fits(self, name: str, value: int, chosen: dict[str, int], gemm: Gemm, target: CudaTarget) -> bool:
        """As sm90_ragged, on the columns of a phase; the tiles of all phases must leave room for a split of K."""
        count = phases(gemm)
        if name == "CK" and value > 1:
            tiles = cdiv(gemm.m, chosen["BM"]) * cdiv(gemm.n // count, chosen["BN"]) * count
            if tiles * value > target.sms:
                return False
        return super().fits(name, value, chosen, replace(gemm, n=gemm.n // count), target)

    def contract(self, schedule: Schedule) -> str:
        gemm, c = schedule.task, SimpleNamespace(**schedule.named)
        zeros = ["gm * gn / 16777216", f"max(0, {c.CK} - cdiv(k, {64 * c.KB}))", f"n % {PHASES}", "1 - min(1, k % 8)"]
        zeros += [f"n / {MOST_COLUMNS}"]
        blocks = f"gm * gn * {c.CK}" if c.CK > 1 else f"min(gm * gn, sms * {c.MINB})"
        chunks = f"{PHASES} * m * cdiv(k + 7, 8)"
        row, length = "cdiv(k + 7, 8) * 16", f"k * {PHASES}"
        moved = [row.replace("16", "8"), "m", PHASES]
        return "\n".join(
            [
                "\n".join(['target = "cuda"', 'arch = "sm_90a"', f'layouts = ["{gemm.layout}"]', *element(gemm), ""]),
                f'[names]\ngm = "cdiv(m, {c.BM})"\ngn = "cdiv(n / {PHASES}, {c.BN}) * {PHASES}"\n'
                f'accepted = "{_sm90.zero(*zeros)}"\n',
                f'[[workspace]]\nname = "shifted"\nbytes = "{chunks} * 16"\n',
                _sm90.tensor_map("map_x", "shifted", moved, [row, f"m * {row}"], [64, c.BM, 1], "128B"),
                _sm90.tensor_map(
                    "map_y", "b", [length, f"n / {PHASES}", 1], [f"2 * {length}"] * 2, [64, c.BN, 1], "128B"
                ),
                f'[[launch]]\nkernel = "pad"\ngrid = ["cdiv({chunks}, {PAD_THREADS * PER_THREAD})"]\n'
                f'block = [{PAD_THREADS}]\nargs = ["a", "shifted", "m", "k", {{uint32 = "{chunks}"}}]\n'
                f'edge = "{"programmatic" if c.EDGE else "plain"}"\n',
                f'[[launch]]\nkernel = "gemm"\ngrid = ["{blocks}"]\nblock = [{block_threads(c.BM, c.BN)}]\n'
                f"cluster = [{c.CK}]\nshared_bytes = {shared_bytes(schedule.named, c.STAGES)}\n"
                f'args = ["map_x", "map_y", "c", "m", "n", "k", {{int32 = {c.BAND}}}, {{int32 = {c.EDGE}}}]\n'
                'edge = "programmatic"',
            ]
        )


@functools.cache
def phases(gemm: Gemm) -> int:
    """Rows of B that together are a multiple of 16 bytes."""
    return next(count for count in (1, 2, 4, 8) if gemm.k * count % 8 == 0)


FAMILY = Phases()
