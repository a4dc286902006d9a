"""Reads by ld.global.nc of what the same kernel writes are refused; what may be something else is not."""

import pytest

from cuda_l2.build import noncoherent

BEGIN = ".visible .entry f(.param .u64 f_param_0, .param .u64 f_param_1)\n{"
P, Q = "ld.param.u64 %rd1, [f_param_0];", "ld.param.u64 %rd2, [f_param_1];"
READ, STORED = "ld.global.nc.f32 %f1, [%rd5+64];", "st.global.f32 [%rd6], %f2;"


@pytest.mark.parametrize(
    "ptx",
    [
        [P, "add.s64 %rd5, %rd1, %rd9;", "cvta.to.global.u64 %rd3, %rd1;", "add.s64 %rd6, %rd3, 4;", READ, STORED],
        [P, "mov.u64 %rd5, %rd1;", "ld.global.L1::evict_last.nc.v4.u32 {%r1, %r2, %r3, %r4}, [%rd5];", "red.global.add.f32 [%rd1], %f2;"],
        [P, "mad.wide.u32 %rd5, %r7, 4, %rd1;", "mad.lo.s64 %rd6, %rd8, 4, %rd1;", READ, STORED],
        [P, "mov.b64 %rd6, %rd1;", "mov.b64 %rd5, %rd6;", "@%p1 ld.global.nc.u32 %r1, [%rd5];", "atom.add.f32 %f1, [%rd6], %f2;"],
    ],
)  # fmt: skip
def test_a_read_of_what_the_same_kernel_writes_is_refused(ptx: list[str]) -> None:
    assert "ld.global.nc" in noncoherent.refuse("\n\t".join([BEGIN, *ptx, "}"]))


@pytest.mark.parametrize(
    "ptx",
    [
        [P, Q, "mov.b64 %rd5, %rd1;", "mov.b64 %rd6, %rd2;", READ, STORED],
        [P, Q, "mov.b64 %rd6, %rd1;", "selp.b64 %rd5, %rd1, %rd2, %p1;", READ, STORED],
        [P, "shl.b64 %rd9, %rd1, 1;", "mov.b64 %rd6, %rd1;", "add.s64 %rd5, %rd8, %rd9;", READ, STORED],
        [P, "mov.b64 %rd5, %rd1;", READ, "st.shared.f32 [%rd1], %f1;", "// st.global.f32 [%rd1], %f1;"],
        [P, "mov.b64 %rd5, %rd1;", READ, "}", BEGIN, P, "mov.b64 %rd6, %rd1;", STORED],
        ["ld.global.u64 %rd5, [%rd3];", "mov.b64 %rd6, %rd5;", READ, STORED],
    ],
)
def test_what_may_be_other_memory_is_let_through(ptx: list[str]) -> None:
    assert noncoherent.refuse("\n\t".join([BEGIN, *ptx, "}"])) == ""
