"""Halves that are missing in the PTX: each is named, and what has both passes."""

import dataclasses

import pytest
from mutation.subjects import SUBJECTS, TASK_SUBJECTS

from cuda_l2.build import unpaired
from cuda_l2.build.cuda import build_all
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.records import BuildStatus, Candidate

TARGET = dataclasses.replace(compile_only("sm_90a"), cores=2)

COPY = "cp.async.cg.shared.global [%r1], [%rd1], 16;"
LOAD = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];"
)
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r2, %r3}], [%r1];"
REDUCTION = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], 64;"
WAIT = "mbarrier.try_wait.parity.shared.b64 %p1, [%r4], 0;"
INIT = "fence.mbarrier_init.release.cluster;"
BARRIER = "mbarrier.init.shared.b64 [%r4], 1;"
COMMIT, LAST = "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group.read 0;"
RELAXED = "barrier.cluster.arrive.relaxed.aligned;"
PROXY = "fence.proxy.async.shared::cta;"


@pytest.mark.parametrize(
    ("ptx", "reason"),
    [
        ([COPY, "cp.async.commit_group;"], "nothing waits for them"),
        ([COPY, "cp.async.wait_group 0;"], "without cp.async.commit_group"),
        ([COPY, "cp.async.commit_group; // cp.async.wait_all;"], "nothing waits for them"),
        ([LOAD, INIT], "no mbarrier is waited for"),
        ([LOAD, WAIT], "without fence.mbarrier_init"),
        ([BARRIER, LOAD, INIT, WAIT], "without fence.mbarrier_init or fence.proxy.async between them"),
        ([BARRIER, INIT, LOAD, BARRIER, LOAD, INIT, WAIT], "a bulk copy follows mbarrier.init"),
        ([STORE, LAST, PROXY], "without cp.async.bulk.commit_group"),
        ([STORE, COMMIT, "cp.async.bulk.wait_group.read 1;", PROXY], "wait_group 0 for the last"),
        ([STORE, COMMIT, LAST], "without fence.proxy.async"),
        ([REDUCTION, COMMIT, LAST], "without fence.proxy.async"),
        (["mapa.shared::cluster.u32 %r1, %r2, %r3;", "barrier.cluster.arrive.aligned;"], "no barrier.cluster.wait"),
        (["red.release.gpu.global.add.u32 [%rd1], 1;", "ld.relaxed.gpu.global.u32 %r1, [%rd1];"], "nothing acquires"),
        (["red.relaxed.gpu.global.add.u32 [%rd1], 1;", "ld.acquire.gpu.global.u32 %r1, [%rd1];"], "nothing releases"),
        (["st.release.sys.global.u32 [%rd1], 1;", "fence.acq_rel.cta;"], "nothing acquires"),
        (["membar.cta;", "atom.global.add.u32 %r1, [%rd1], 1;"], "own block or cluster alone"),
        (["fence.acq_rel.cluster;", "red.relaxed.gpu.add.u32 [%rd1], 1;"], "own block or cluster alone"),
        ([RELAXED, "barrier.cluster.wait;"], "arrive.relaxed, and no fence"),
        (["barrier.cluster.arrive.aligned .relaxed;", "barrier.cluster.wait;"], "arrive.relaxed, and no fence"),
        ([RELAXED, "barrier.cluster.wait;", "fence.acq_rel.cta;"], "arrive.relaxed, and no fence"),
    ],
)
def test_a_missing_half_is_named(ptx: list[str], reason: str) -> None:
    assert reason in unpaired.refuse("\n\t".join(ptx))


@pytest.mark.parametrize(
    "ptx",
    [
        [COPY, "cp.async.commit_group;", "cp.async.wait_group 2;"],
        [COPY, "cp.async.wait_all;"],
        [COPY, "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];"],
        [LOAD, WAIT, INIT],
        [LOAD, WAIT, PROXY],
        [STORE, COMMIT, LAST, PROXY],
        [REDUCTION, COMMIT, "cp.async.bulk.wait_group 0;", "fence.proxy.async;"],
        ["red.release.gpu.global.add.u32 [%rd1], 1;", "ld.acquire.gpu.global.u32 %r1, [%rd1];"],
        ["atom.add.acq_rel.gpu.global.u32 %r1, [%rd1], 1;"],
        ["mbarrier.arrive.release.cta.shared.b64 _, [%r1];", "barrier.cluster.arrive.release;"],
        ["ld.global.u32 %r1, [%rd1];"],
        ["membar.cta;", "atom.shared.add.u32 %r1, [%r2], 1;"],
        [
            "fence.sc.cta;",
            "atom.global.add.f32 %f1, [%rd1], 0f3F800000;",
            "red.relaxed.gpu.add.noftz.bf16x2 [%rd1], %r1;",
        ],
        [RELAXED, "barrier.cluster.wait;", "barrier.cluster.arrive.aligned;"],
        [RELAXED, "barrier.cluster.wait;", INIT],
        [RELAXED, "barrier.cluster.wait;", "fence.acq_rel.cluster;"],
        ["barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"],
    ],
)
def test_both_halves_pass_wherever_they_stand(ptx: list[str]) -> None:
    assert unpaired.refuse("\n\t".join(ptx)) == unpaired.refuse("\n\t".join(reversed(ptx))) == ""


@pytest.mark.parametrize(
    "ptx",
    [
        [BARRIER, INIT, LOAD, BARRIER, BARRIER, PROXY, LOAD, WAIT],
        [LOAD, WAIT, BARRIER, INIT],
        [BARRIER, STORE, COMMIT, LAST, PROXY],
        [".func begin(", BARRIER, ")", ".func copy(", LOAD, WAIT, ")", ".visible .entry kernel(", INIT],
    ],
)
def test_a_fence_between_a_barriers_initialisation_and_the_next_copy_is_enough(ptx: list[str]) -> None:
    assert unpaired.refuse("\n\t".join(ptx)) == ""


COUNT, TOLD = "atom.global.inc.u32 %r1, [%rd1], 3;", "st.volatile.global.u32 [%rd1], 1;"
LOOKED = "setp.eq.u32 %p1, %r1, 3;"
ENTRY, STORED = ".visible .entry kernel(", "st.global.f32 [%rd3], %f1;"
CACHED, DEPENDENTS = "st.global.cg.u32 [%rd1], 1;", "griddepcontrol.launch_dependents;"


@pytest.mark.parametrize(
    ("ptx", "refused"),
    [
        ([ENTRY, STORED, COUNT, LOOKED, "membar.gl;"], True),
        ([ENTRY, STORED, COUNT, LOOKED, "fence.acq_rel.gpu;"], True),
        ([ENTRY, STORED, COUNT, "membar.gl;"], False),  # nothing depends on the count
        ([ENTRY, STORED, "membar.gl;", COUNT, LOOKED], False),
        ([ENTRY, STORED, "membar.gl;", COUNT, LOOKED, "membar.gl;"], False),
        ([ENTRY, STORED, "membar.gl;", COUNT, LOOKED, "ld.acquire.gpu.global.u32 %r1, [%rd1];"], False),
        ([STORED, "membar.cta;", "membar.gl;", COUNT, LOOKED], False),
        ([ENTRY, STORED, "membar.gl;", COUNT, ".visible .entry other(", STORED, COUNT, LOOKED, "membar.gl;"], True),
        (
            [ENTRY, STORED, COUNT, LOOKED, "membar.gl;", TOLD],
            False,
        ),  # a ticket is taken, and data are handed over afterwards
        ([ENTRY, STORED, COUNT, LOOKED, "membar.gl;", CACHED], False),
        ([ENTRY, STORED, COUNT, LOOKED, "membar.gl;", "st.global.wt.u32 [%rd1], 1;"], False),
        ([ENTRY, STORED, COUNT, LOOKED, "membar.gl;", DEPENDENTS], False),
        ([ENTRY, STORED, COUNT, LOOKED, "membar.gl;", "red.async.mmio .release.sys.global.add.u32 [%rd1], 1;"], False),
        ([ENTRY, STORED, "st.release.gpu.global.u32 [%rd2], 1;", COUNT, LOOKED, "membar.gl;"], False),
        ([ENTRY, STORED, COUNT, LOOKED, "membar.gl;", "st.shared.volatile.u32 [%r7], 1;"], True),
        ([ENTRY, STORED, "$L__1:", COUNT, LOOKED, "membar.gl;", "@%p1 bra $L__1;"], False),
        ([ENTRY, STORED, COUNT, LOOKED, "$L__1:", "membar.gl;", "@%p1 bra $L__1;"], True),
        ([ENTRY, STORED, "atom.acq_rel.gpu.global.inc.u32 %r1, [%rd1], 3;", LOOKED, "membar.gl;"], False),
        (
            [ENTRY, STORED, "$L__1:", "atom.global.add.u32 %r1, [%rd1], 0;", LOOKED, "@!%p1 bra $L__1;", "membar.gl;"],
            False,
        ),
        ([ENTRY, STORED, "atom.global.cas.b32 %r1, [%rd1], 0, 1;", LOOKED, "membar.gl;"], False),
        ([ENTRY, STORED, "red.global.add.f32 [%rd1], %f1;", "membar.gl;"], False),
        ([".func fence(", "membar.gl;", ENTRY, STORED, "call fence;", COUNT, LOOKED, "membar.gl;"], False),
        ([ENTRY, "red.global.add.f32 [%rd3], %f1;", COUNT, LOOKED, "membar.gl;"], True),
        ([ENTRY, "st.v4.f32 [%rd3], {%f1, %f2, %f3, %f4};", COUNT, LOOKED, "membar.gl;"], True),
        ([ENTRY, STORE, COMMIT, LAST, PROXY, COUNT, LOOKED, "membar.gl;"], True),
        ([ENTRY, "st.shared.u32 [%r7], 1;", COUNT, LOOKED, STORED, "membar.gl;"], False),  # a place for what is kept
        ([ENTRY, COUNT, LOOKED, STORED, "membar.gl;", "@%p1 bra $L__1;", STORED, "$L__1:"], False),  # a tile's number
    ],
)
def test_a_count_needs_a_fence_before_it_where_the_function_has_any(ptx: list[str], refused: bool) -> None:
    assert ("before the function's first fence" in unpaired.refuse("\n\t".join(ptx))) == refused


@pytest.mark.parametrize(
    ("subject", "dropped", "reason"),
    [
        ("pipelined", "commit_copies();", "without cp.async.commit_group"),
        ("wave", "bar_init_fence();", "without fence.mbarrier_init"),
        ("persistent", "tma_store_commit();", "without cp.async.bulk.commit_group"),
        ("persistent by warpgroups", "proxy_fence();", "without fence.proxy.async"),
        ("persistent", "tma_store_wait_read<0>();", "wait_group 0"),
        ("wave counted", "ld.acquire", "nothing acquires"),
    ],
)
def test_a_kernel_of_ours_is_refused_without_one_half(subject: str, dropped: str, reason: str) -> None:
    source = next(each for each in SUBJECTS if each.name == subject).candidate(TARGET).source
    assert dropped in source
    without = source.replace(dropped, "ld.relaxed" if dropped == "ld.acquire" else "((void)0);")
    whole, half = build_all([Candidate(source), Candidate(without)], TARGET)
    assert whole.status is BuildStatus.BUILT
    assert half.status is BuildStatus.REFUSED
    assert reason in half.reason


@pytest.mark.parametrize("subject", ["gpu cross entropy", "gpu mean"])
def test_the_fence_before_blocks_are_counted_is_asked_for(subject: str) -> None:
    source = next(each for each in TASK_SUBJECTS if each.name == subject).candidate(TARGET).source
    without = source.replace("__threadfence();", "((void)0);", 1)
    whole, half = build_all([Candidate(source), Candidate(without)], TARGET)
    assert whole.status is BuildStatus.BUILT
    assert half.status is BuildStatus.REFUSED and "before the function's first fence" in half.reason


@pytest.mark.parametrize("subject", ["wave", "wave in clusters"])
def test_each_of_a_kernels_fences_behind_its_barriers_initialisation_is_asked_for(subject: str) -> None:
    source = next(each for each in SUBJECTS if each.name == subject).candidate(TARGET).source
    pieces = source.split("bar_init_fence();")
    assert len(pieces) == 3
    mutants = ["((void)0);".join(pieces[:2]) + "bar_init_fence();" + pieces[2]]
    mutants += [pieces[0] + "bar_init_fence();" + "((void)0);".join(pieces[1:])]
    for build in build_all([Candidate(mutant) for mutant in mutants], TARGET):
        assert build.status is BuildStatus.REFUSED
        assert "a bulk copy follows mbarrier.init" in build.reason
