"""cuda-l2 throughput: how many distinct candidates a second this machine builds, verifies and times."""

from cuda_l2.commands._options import require_target, tell
from cuda_l2.records import Gemm
from cuda_l2.system.errors import UserError

WARM_UP = 32
"""Candidates not counted: the processes that build start with them."""


def command(shape: str = "256x256x256", /, *, candidates: int = 200, target: str = "auto", seed: int = 0) -> None:
    """Judge distinct random schedules of a shape and print candidates a second, and where the time goes.

    Args:
        shape: As in 256x256x256.
        candidates: How many, after a few that warm the machine up.
        target: cpu, cuda, or auto.
        seed: Of the schedules; others have been built before only if the same seed was run.
    """
    gemm = Gemm.parse(shape)
    require_target(target)
    if seed < 0:
        raise UserError(f"the seed must not be negative, as {seed} is")
    if candidates < 1:
        raise UserError(f"the number of candidates must be at least 1, not {candidates}")

    import collections
    import time

    import numpy as np

    from cuda_l2.evaluator import Evaluator
    from cuda_l2.families._base import families_for
    from cuda_l2.propose._base import proposer_maker, space_for
    from cuda_l2.report.live import GridProgress
    from cuda_l2.rigs import open_rig

    with open_rig(target) as rig, Evaluator(gemm, rig) as evaluator:
        tell(f"{gemm} on {rig.target.model}: warming up ...")
        space = space_for(families_for(gemm, rig.target), gemm, rig.target)
        proposer = proposer_maker("random")(space, list, np.random.default_rng(seed))
        list(evaluator.evaluate([space.render(values, "default") for values in space.defaults()]))
        distinct = {candidate.id: candidate for candidate in proposer.propose(4 * candidates)}
        chosen = list(distinct.values())[:candidates]
        others = [c for c in proposer.propose(2 * WARM_UP) if c.id not in distinct][:WARM_UP]
        list(evaluator.evaluate(others))
        if len(chosen) < candidates:
            raise UserError(f"{gemm} has too few distinct schedules; ask for {len(chosen)}")
        before = dict(evaluator.stage_seconds)
        start = time.perf_counter()
        statuses: collections.Counter[str] = collections.Counter()
        with GridProgress(candidates, 0, "candidate") as line:
            for trial in evaluator.evaluate(chosen):
                statuses[trial.status] += 1
                line.done(gemm)
        seconds = time.perf_counter() - start
        stages = {stage: total - before[stage] for stage, total in evaluator.stage_seconds.items()}
        print(f"{candidates / seconds:.1f} candidates a second: {candidates} of {gemm} on {rig.target.model}")
        print("what became of them: " + ", ".join(f"{count} {status}" for status, count in statuses.most_common()))
        print(
            f"of {seconds:.1f} s: waiting for builds {stages['build']:.1f}, verifying {stages['verify']:.1f},"
            f" timing {stages['measure']:.1f}"
        )
