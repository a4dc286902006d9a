"""CUDA cheats and controls for tasks other than matrix products: what shows without a GPU; test_cuda_cheats has one."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_cheats import TASKS_FOLDER, Cheat, all_cheats
from cuda_on_cpu import bench_of
from drawing import cases

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
from fake_gpu import fake_gpu  # noqa: F401 - a fixture

from cuda_l2 import tasks
from cuda_l2.build.stress import stressed
from cuda_l2.contract import ContractError, plan_cuda
from cuda_l2.records import Build, BuildStatus, Operation, VerdictStatus
from cuda_l2.tasks.cases import OwnCases

CORPUS = all_cheats(TASKS_FOLDER)
LEAST, LEAST_HONEST = 20, 3
NOT_HERE = {"missing_wait", "late_wait", "honest_programmatic", "kept_in_global", "order_of_atomics", "block_race"}
NOT_HERE |= {"skips_before_successor", "counts_to_the_last"}
"""What a CPU that runs one thread after the other does not show, or does not compile."""
SMS = 132
CASES = cases(CORPUS, lambda cheat: cheat.honest, lambda cheat: cheat.name)
cheats = pytest.mark.parametrize("cheat", CASES)


def test_the_corpus_is_large_and_has_honest_controls() -> None:
    honest = [cheat for cheat in CORPUS if cheat.honest]
    assert len(CORPUS) - len(honest) >= LEAST and len(honest) >= LEAST_HONEST
    assert len({cheat.source for cheat in CORPUS}) == len(CORPUS)


@cheats
def test_a_contract_says_what_to_launch_at_its_own_sizes_and_at_others(cheat: Cheat) -> None:
    task = tasks.parse(cheat.shape)
    assert isinstance(task, Operation)
    if cheat.name == "wrong_type":
        with pytest.raises(ContractError, match="float16"):
            plan_cuda(cheat.source, task, SMS)
        return
    for each in (task, *OwnCases(task, 1).others):
        plan = plan_cuda(cheat.source, each, SMS)
        assert all(f" {launch.kernel}(" in cheat.source for launch in plan.launches)


@pytest.mark.corpus(4)
@cheats
def test_a_file_builds_or_is_refused_as_it_says(cheat: Cheat, build_of: Callable[[str], Build]) -> None:
    build = build_of(cheat.source)
    if build.status is BuildStatus.BUILT:
        assert cheat.expect - {"refused", "failed"}, "should not have been built"
    else:
        assert cheat.accepts(str(build.status), build.reason), build.reason + build.log
    if cheat.honest:
        assert build_of(stressed(cheat.source, 1)).status is BuildStatus.BUILT


@pytest.mark.corpus(4)
@pytest.mark.parametrize("cheat", [case for case in CASES if case.id not in NOT_HERE])
def test_a_cheat_ends_as_its_file_says_on_a_stand_in(
    cheat: Cheat,
    fake_gpu: Any,  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    """With this machine's memory in place of a device's, and the source compiled for this CPU."""
    from cuda_l2.measure.protocols import CUDA_PROTOCOLS  # noqa: PLC0415 - skipped without cuda-bindings

    task = tasks.parse(re.sub("rows=.*", "rows=6,columns=1000", cheat.shape))
    bench, candidate, build = bench_of(fake_gpu, cheat.source, task, tmp_path)
    verdict = bench.verify(candidate, build)
    status, reason = str(verdict.status), verdict.reason
    if verdict.status is VerdictStatus.CORRECT:
        timing = bench.time(candidate, build, CUDA_PROTOCOLS["search"])
        status, reason = str(timing.status), timing.reason
    assert status in cheat.expect or (status == "unhygienic" and "crashed" in cheat.expect), (status, reason)
