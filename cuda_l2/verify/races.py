"""No access outside the tensors, none to shared memory that nothing orders, no read of unwritten scratch.

That is compute-sanitizer's word. Its memcheck, racecheck and initcheck run the candidate in processes of their own, at
the session's sizes or, where those are large, at smaller ones: of a matrix product at a shape that is laid out alike,
of another task at sizes that the contract takes. Left out, and not among the checks passed, where the tool cannot watch
the GPU. Not covered: races in global memory, and what the tools do not see of the asynchronous instructions; stress
builds look for both.
"""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from cuda_l2.contract import ContractError
from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cuda.sanitizer import Tool
from cuda_l2.records import Build, Gemm, Task, VerdictStatus
from cuda_l2.verify._base import Check, CheckFailed, GpuSession, Session

LARGE_FLOPS, LARGE_BYTES = 1 << 34, 32 << 20
"""Up to here, some seconds for a kernel that keeps racecheck busy, the task itself is checked. A product's bytes do not
count."""
SIDES = (8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 512)
"""A smaller size is a multiple of the same ones of these: the sides of tiles, and what alignment asks for."""
LEAST_K = (2048, 4096, 8192)
"""More than all shared memory holds of two tiles of 64 rows: a ring of stages wraps."""
LEAST_MN = (256, 512, 1024, 2048, 4096, 8192)
WAVES = 2
LARGEST_TILE = 128 * 256
"""Elements of a tile of C, for a block that takes several: their number does not show in the grid."""


class Races(Check):
    name = "races"
    order = 70
    full_only = True

    def applies(self, session: Session) -> bool:
        return isinstance(session, GpuSession) and session.sanitizes()

    def run(self, session: Session) -> None:
        assert isinstance(session, GpuSession)
        at = smaller(session)
        case = session.cases.alone(at)
        look(session.plan_for(at), session.build, lambda tool: session.sanitize(tool, at, case), at, session.task)


def look(plan: Plan, build: Build, sanitize: Callable[[Tool], str], at: Task, own: Task) -> None:
    """CheckFailed where one of the tools that have something to look at finds anything; all at once."""
    tools = [Tool.MEMCHECK]
    shared = [kernel.shared_bytes for kernel in build.kernels]
    if any(shared + [launch.shared_bytes for launch in plan.launches]):
        tools.append(Tool.RACECHECK)
    if not all(workspace.persistent for workspace in plan.workspaces):
        tools.append(Tool.INITCHECK)
    with ThreadPoolExecutor(len(tools)) as pool:
        found = [pool.submit(sanitize, tool) for tool in tools]
    for tool, future in zip(tools, found, strict=True):
        finding = future.result()
        if finding:
            raise failed(tool, at, own, finding)


def failed(tool: Tool, at: Task, own: Task, finding: str) -> CheckFailed:
    """What a tool found at some shape, as a failure at the candidate's own."""
    where = "" if at == own else f" (at {at})"
    return CheckFailed(VerdictStatus.UNHYGIENIC, f"{tool}{where}: {finding}")


def smaller(session: GpuSession) -> Task:
    """The session's task at its own sizes, or where they are large at smaller ones."""
    task = session.task
    if task.product:
        return task if task.flops <= LARGE_FLOPS else _smaller_product(session, task)
    if task.bytes <= LARGE_BYTES and task.flops <= LARGE_FLOPS:
        return task
    return next(filter(session.serves, session.cases.others), task)


def _smaller_product(session: GpuSession, gemm: Gemm) -> Gemm:
    """The least shape found that is laid out as a large one is; itself where there is none."""
    real = session.plan_for(gemm)
    sizes = [list(_alike(size, least)) for size, least in ((gemm.m, LEAST_MN), (gemm.n, LEAST_MN), (gemm.k, LEAST_K))]
    shapes = [replace(gemm, m=m, n=n, k=k) for m, n, k in itertools.product(*sizes)]
    for shape in sorted(shapes, key=lambda shape: shape.flops):
        try:
            plan = session.plan_for(shape)
        except ContractError:
            continue  # written for fewer shapes than it could be
        if _layout(plan) == _layout(real) and _busy(shape, plan, gemm, real, session.sms):
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


def _busy(shape: Gemm, plan: Plan, gemm: Gemm, real: Plan, sms: int) -> bool:
    """Whether every launch still has as many waves of blocks, or two; persistent blocks as many tiles, or two each."""

    def blocks(of: Plan) -> list[int]:
        return [x.grid[0] * x.grid[1] * x.grid[2] for x in of.launches]

    waves = all(few >= min(many, WAVES * sms) for few, many in zip(blocks(plan), blocks(real), strict=True))
    persistent = any(few == many for few, many in zip(blocks(plan), blocks(real), strict=True))
    area = min(gemm.m * gemm.n, WAVES * sms * LARGEST_TILE) if persistent else 0
    return waves and shape.m * shape.n >= area


CHECK = Races()
