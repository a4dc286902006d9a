"""No access outside the arrays, and no two accesses to shared memory that nothing orders: compute-sanitizer's word.

Its memcheck and racecheck run the candidate in a process of their own, at the session's shape or, where that is large,
at a smaller one that is laid out alike. Not covered: races in global memory, and whatever the tools do not see (see
docs/verification.md); stress builds look for those.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from cuda_l2.contract import ContractError
from cuda_l2.contract.cuda import Plan
from cuda_l2.execute.sanitizer import Tool
from cuda_l2.records import Gemm, VerdictStatus
from cuda_l2.verify._base import Check, CheckFailed, GpuSession, Session

LARGE_FLOPS = 1 << 36
"""Up to here, a few ms of even a slow kernel, the shape itself is checked."""
SIDES = (8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 512)
"""A smaller size is a multiple of the same ones of these: the sides of tiles, and what alignment asks for."""
LEAST_K = (4096, 8192)
"""More than the longest ring of stages holds, so that it wraps."""
LEAST_MN = (256, 512, 1024, 2048, 4096, 8192)
LARGEST_TILE = 128 * 256
WAVES = 2


class Races(Check):
    name = "races"
    order = 70
    full_only = True

    def applies(self, session: Session) -> bool:
        return isinstance(session, GpuSession) and session.sanitizes()

    def run(self, session: Session) -> None:
        assert isinstance(session, GpuSession)
        gemm = smaller(session)
        tools = [Tool.MEMCHECK]
        if any(kernel.shared_bytes for kernel in session.build.kernels) or any(
            launch.shared_bytes for launch in session.plan_for(gemm).launches
        ):
            tools.append(Tool.RACECHECK)
        with ThreadPoolExecutor(len(tools)) as pool:
            found = list(pool.map(lambda tool: session.sanitize(tool, gemm), tools))
        for tool, finding in zip(tools, found, strict=True):
            if finding:
                where = "" if gemm == session.gemm else f" (at {gemm})"
                raise CheckFailed(VerdictStatus.UNHYGIENIC, f"{tool}{where}: {finding}")


def smaller(session: GpuSession) -> Gemm:
    """The session's shape, or where it is large the least one found that is laid out alike."""
    gemm = session.gemm
    if gemm.flops <= LARGE_FLOPS:
        return gemm
    area = min(gemm.m * gemm.n, WAVES * session.sms * LARGEST_TILE)
    real = session.plan_for(gemm)
    sizes = [list(_alike(size, least)) for size, least in ((gemm.m, LEAST_MN), (gemm.n, LEAST_MN), (gemm.k, LEAST_K))]
    shapes = [replace(gemm, m=m, n=n, k=k) for m, n, k in itertools.product(*sizes) if m * n >= area]
    for shape in sorted(shapes, key=lambda shape: shape.flops):
        try:
            plan = session.plan_for(shape)
        except ContractError:
            continue  # written for fewer shapes than it could be
        if _layout(plan) == _layout(real) and _busy(plan, real, session.sms):
            return shape
    return gemm


def _alike(size: int, least: tuple[int, ...]) -> Iterator[int]:
    """Sizes up to this one, each the least above a bound that is a multiple of the same sides; itself last."""
    sides = [size % side == 0 for side in SIDES]
    for bound in least:
        for other in range(bound, size):
            if [other % side == 0 for side in SIDES] == sides:
                yield other
                break
    yield size


def _layout(plan: Plan) -> list[object]:
    """What of a plan must not change with the shape."""
    launches = [
        (x.kernel, x.block, x.cluster, x.shared_bytes, x.coresident, x.programmatic, len(x.arguments))
        for x in plan.launches
    ]
    return [launches, [(x.name, x.box) for x in plan.tensor_maps], [(x.name, x.persistent) for x in plan.workspaces]]


def _busy(plan: Plan, real: Plan, sms: int) -> bool:
    """Whether every launch still has as many waves of blocks as the real one, or two."""

    def blocks(of: Plan) -> list[int]:
        return [x.grid[0] * x.grid[1] * x.grid[2] for x in of.launches]

    return all(b >= min(r, WAVES * sms) for b, r in zip(blocks(plan), blocks(real), strict=True))


CHECK = Races()
