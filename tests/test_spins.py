"""Waits that give up and blocks that wait for others: the PTX tells them from loops that only look alike."""

import dataclasses

import pytest
from cuda_cheats import all_cheats

from cuda_l2.build import spins
from cuda_l2.build.cuda import build_all
from cuda_l2.contract import parse_cuda
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.records import BuildStatus, Candidate

TARGET = dataclasses.replace(compile_only("sm_90a"), cores=2)
LOOK = "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%r9], %r8; selp.u32 %r2, 1, 0, p; }"
FLAG, TELL = "ld.acquire.gpu.global.u32 %r2, [%rd1];", "st.release.gpu.global.u32 [%rd1], 1;"
OPEN, COUNT, BOTH = "setp.eq.s32 %p1, %r2, 0;", "add.s32 %r1, %r1, 1;", "and.pred %p3, %p1, %p2;"
AGAIN = "@%p3 bra $L__1;"
WAIT = ["$L__1:", FLAG, OPEN, "@%p1 bra $L__1;"]
QUICK = ["$L__1:", FLAG, OPEN, COUNT, "setp.lt.u32 %p2, %r1, 1000;", BOTH, AGAIN]
AHEAD, FEW = ["$L__1:", FLAG, "setp.gt.u32 %p1, %r2, %r1;"], ["setp.lt.u32 %p3, %r1, 100;", AGAIN]


def kernel(*lines: str) -> str:
    return "\n".join((".visible .entry kernel(.param .u64 x)", "{", *lines, "ret;", "}"))


@pytest.mark.parametrize(
    ("lines", "polls"),
    [
        (["mov.u32 %r1, 0;", "$L__1:", LOOK, OPEN, COUNT, "setp.lt.u32 %p2, %r1, 3000;", BOTH, AGAIN], 3000),
        (["$L__1:", FLAG, OPEN, COUNT, "setp.lt.u32 %p2, %r1, 4000;", BOTH, AGAIN], 4000),
        (["$L__1:", LOOK, "@p bra $L__2;", COUNT, "setp.ne.s32 %p2, %r1, 500;", "@%p2 bra $L__1;", "$L__2:"], 500),
        (["mov.u32 %r1, 700;", "$L__1:", LOOK, OPEN, "add.s32 %r1, %r1, -1;", "setp.ne.s32 %p2, %r1, 0;", BOTH, AGAIN], 700),
        (["$L__1:", LOOK, OPEN, COUNT, "setp.lt.u32 %p2, %r1, 4194303;", BOTH, AGAIN], 0),
        (["$L__1:", LOOK, OPEN, COUNT, "setp.lt.u32 %p2, %r1, 3000;", BOTH, AGAIN, "@%p1 trap;"], 0),
        (["$L__1:", LOOK, OPEN, COUNT, "setp.lt.u32 %p2, %r1, 9;", "@%p2 nanosleep.u32 %r1;", "@%p1 bra $L__1;"], 0),
        (["$L__1:", LOOK, OPEN, COUNT, "setp.lt.u32 %p2, %r1, 9;", "mma.sync %r4;", BOTH, AGAIN], 0),
        (["$L__1:", "ld.volatile.global.f32 %f1, [%rd1];", "add.f32 %f2, %f2, %f1;", "add.s64 %rd1, %rd1, 4;",
          COUNT, "setp.lt.u32 %p3, %r1, 64;", AGAIN], 0),
        (WAIT, 0),
        ([*QUICK, OPEN, "@!%p1 bra $L__3;", "$L__2:", "nanosleep.u32 100;", FLAG, OPEN, "@%p1 bra $L__2;", "$L__3:"], 0),
        ([*(line.replace(FLAG, LOOK) for line in QUICK), OPEN, "$L__2:", LOOK, OPEN, "@%p1 bra $L__2;"], 0),
        (["mov.u32 %r1, 017;", "$L__1:", FLAG, OPEN, "add.s32 %r1, %r1, -1;", "setp.ne.s32 %p2, %r1, 0;", BOTH, AGAIN], 15),
        (["$L__1:", FLAG, OPEN, COUNT, "setp.lt.u32 %p2, %r1, 0b100U;", BOTH, AGAIN], 4),
        (["bar.sync 0, 0200;", "bar.sync 09, " + "9" * 5000 + ";", *WAIT], 0),
        (["$L__1:", "mov.u32 %r1, %r9;", FLAG, OPEN, "setp.lt.u32 %p2, %r1, 3000;", BOTH, "add.s32 %r9, %r1, 1;", AGAIN], 3000),
        (["$L__1:", FLAG, OPEN, "add.s32 %r1, %r9, 1;", "setp.lt.u32 %p2, %r1, 3000;", BOTH, "mov.u32 %r9, %r1;", AGAIN], 3000),
        ([*AHEAD, "selp.u32 %r5, 1, 0, %p1;", "add.s32 %r1, %r1, %r5;", *FEW], 0),  # counts progress
        ([*AHEAD, "add.s32 %r5, %r1, 1;", "selp.b32 %r1, %r5, %r1, %p1;", *FEW], 0),
        ([*AHEAD, "@%p1 add.s32 %r1, %r1, 1;", *FEW], 0),
        ([*AHEAD, "@!%p1 bra $L__2;", COUNT, "$L__2:", *FEW], 0),
        ([*AHEAD, "@%p1 bra $L__2;", "bra.uni $L__3;", "$L__2:", COUNT, "$L__3:", *FEW], 0),
        (["$L__1:", FLAG, OPEN, *["mov.u32 %r7, 1;"] * 256, COUNT, "setp.lt.u32 %p2, %r1, 9;", BOTH, AGAIN], 0),  # too long
        (["$L__1:", FLAG, COUNT, *FEW], 100),  # whatever it reads
        (["$L__1:", LOOK, OPEN, "selp.u32 %r8, 1, 0, %p1;", "add.s32 %r3, %r4, %r8;", "setp.lt.u32 %p2, %r4, 2999;", BOTH,
          "mov.u32 %r4, %r3;", AGAIN], 2999),  # nvcc's do { } while (!ok && ++i < 3000)
        (["$L__0:", *WAIT, COUNT, "setp.lt.u32 %p2, %r1, 32;", "@%p2 bra $L__0;"], 0),
    ],
)  # fmt: skip
def test_a_wait_that_gives_up_is_told_from_one_that_does_not(lines: list[str], polls: int) -> None:
    reason = spins.refuse(kernel(*lines))
    assert f"gives up after {polls} polls," in reason if polls else not reason


@pytest.mark.parametrize(
    ("lines", "waits"),
    [
        ([TELL, *WAIT], True),
        (["red.release.gpu.global.add.u32 [%rd1], 1;", *WAIT], True),
        (["atom.global.add.u32 %r5, [%rd1], 1;", *WAIT], True),
        (["atom.global.add.u32 %r5, [%rd2], 1;", "mad.lo.s32 %r6, %r5, 4, %r7;", *WAIT], False),  # a number is taken
        (WAIT, False),  # for an earlier launch
        ([TELL, "$L__1:", "ld.acquire.cta.shared.u32 %r2, [%r9];", OPEN, "@%p1 bra $L__1;"], False),
        ([TELL, "$L__1:", LOOK, OPEN, "@%p1 bra $L__1;"], False),
        ([TELL, "$L__1:", "ld.acquire.cluster.u32 %r2, [%rd1];", OPEN, "@%p1 bra $L__1;"], False),
        ([TELL, "$L__1:", "ld.relaxed.cta.global.u32 %r2, [%rd1];", OPEN, "@%p1 bra $L__1;"], False),
        ([TELL, *AHEAD, "selp.u32 %r5, 1, 0, %p1;", "add.s32 %r1, %r1, %r5;", *FEW], True),
        ([TELL, FLAG, OPEN, "@%p1 bra $L__1;", "$L__1:"], False),
        ([TELL, "$L__1:", FLAG, "fence.acq_rel.gpu;", "nanosleep.u32 %r9;", OPEN, "@%p1 bra $L__1;"], True),
        ([TELL, "$L__1:", FLAG, COUNT, "setp.lt.s32 %p1, %r1, %r7;", "@%p1 bra $L__1;"], False),
    ],
)
def test_blocks_that_wait_for_others_are_named(lines: list[str], waits: bool) -> None:
    assert spins.waiting(kernel(*lines)) == (("kernel",) if waits else ())


def test_such_blocks_are_refused_unless_all_are_resident() -> None:
    source = next(cheat.source for cheat in all_cheats() if cheat.name == "last_block_first")
    said = source.replace('"n", "k", "flags"]', '"n", "k", "flags"]\ncoresident = true', 1)
    alone, first = build_all([Candidate(source), Candidate(said)], TARGET)
    assert alone.status is BuildStatus.REFUSED and "launch 2: blocks of gemm wait" in alone.reason
    assert first.status is BuildStatus.BUILT
    (kept,) = build_all([Candidate(source.replace("bytes = 64", "bytes = 128", 1))], TARGET)  # compiled before
    assert kept.status is BuildStatus.REFUSED and kept.reason == alone.reason
    assert not spins.refuse_alone((), parse_cuda(source))
