"""cuda-l2 throughput: how many distinct candidates a second this machine builds, verifies and times."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from cuda_l2.commands._options import require_target, tell
from cuda_l2.records import Candidate, Gemm, Trial
from cuda_l2.system.errors import UserError

if TYPE_CHECKING:
    from cuda_l2.evaluator import Evaluator
    from cuda_l2.runs.judging import JudgePool

WARM_UP = 32
"""Candidates not counted: the processes that build start with them."""


def command(
    shape: str = "256x256x256", /, *, candidates: int = 200, target: str = "auto", seed: int = 0, judges: int = 1
) -> None:
    """Judge distinct random schedules of a shape and print candidates a second, and where the time goes.

    Args:
        shape: As in 256x256x256.
        candidates: How many, after a few that warm the machine up.
        target: cpu, cuda, or auto.
        seed: Of the schedules; others have been built before only if the same seed was run.
        judges: Number of processes that judge on the GPU: they verify at once, and take turns to time.
    """
    gemm = Gemm.parse(shape)
    require_target(target)
    if seed < 0:
        raise UserError(f"the seed must not be negative, as {seed} is")
    if candidates < 1:
        raise UserError(f"the number of candidates must be at least 1, not {candidates}")

    if judges < 1:
        raise UserError(f"the number of judges must be at least 1, not {judges}")

    import collections
    import contextlib
    import time

    import numpy as np

    from cuda_l2.evaluator import Evaluator
    from cuda_l2.families._base import families_for
    from cuda_l2.propose._base import proposer_maker, space_for
    from cuda_l2.report.live import GridProgress
    from cuda_l2.rigs import open_rig
    from cuda_l2.runs.judging import JudgePool
    from cuda_l2.runs.workers import gpus

    with contextlib.ExitStack() as held:
        rig = held.enter_context(open_rig(target))
        evaluator = held.enter_context(Evaluator(gemm, rig, judges_here=judges == 1))
        judge: Callable[[Sequence[Candidate]], Iterator[Trial]] = evaluator.evaluate
        if judges > 1:
            asked, judges = gpus("1", rig.target.name, "--judges"), rig.together(gemm, judges)
            pool = held.enter_context(JudgePool(asked, rig.target.name, tell, each=judges))
            judge = partial(_judged, pool, evaluator)
        tell(f"{gemm} on {rig.target.model}: warming up ...")
        space = space_for(families_for(gemm, rig.target), gemm, rig.target)
        proposer = proposer_maker("random")(space, list, np.random.default_rng(seed))
        list(judge([space.render(values, "default") for values in space.defaults()]))
        distinct = {candidate.id: candidate for candidate in proposer.propose(4 * candidates)}
        chosen = list(distinct.values())[:candidates]
        others = [c for c in proposer.propose(2 * WARM_UP) if c.id not in distinct][:WARM_UP]
        list(judge(others))
        if len(chosen) < candidates:
            raise UserError(f"{gemm} has too few distinct schedules; ask for {len(chosen)}")
        before = dict(evaluator.stage_seconds)
        start = time.perf_counter()
        statuses: collections.Counter[str] = collections.Counter()
        with GridProgress(candidates, 0, "candidate") as line:
            for trial in judge(chosen):
                statuses[trial.status] += 1
                line.done(gemm)
        seconds = time.perf_counter() - start
        stages = {stage: total - before[stage] for stage, total in evaluator.stage_seconds.items()}
        by = f", {judges} judges" if judges > 1 else ""
        print(f"{candidates / seconds:.1f} candidates a second: {candidates} of {gemm} on {rig.target.model}{by}")
        print("what became of them: " + ", ".join(f"{count} {status}" for status, count in statuses.most_common()))
        print(
            f"of {seconds:.1f} s: waiting for builds {stages['build']:.1f}, verifying {stages['verify']:.1f},"
            f" timing {stages['measure']:.1f}"
        )


def _judged(judges: "JudgePool", evaluator: "Evaluator", candidates: Sequence[Candidate]) -> Iterator[Trial]:
    """Trials of candidates in order, which other processes judge."""
    from cuda_l2.search import begin, taken

    builds = evaluator.rig.prefetch(candidates)
    futures = [begin(judges, evaluator, *each) for each in zip(candidates, builds, strict=True)]
    for future in futures:
        yield taken(judges, evaluator, future)
