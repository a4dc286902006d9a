"""machine/cpu/ceilings.py: the largest of what was measured, kept once nothing interrupted it; which machine it is."""

import dataclasses

import pytest

from cuda_l2.commands import doctor
from cuda_l2.machine.cpu import ceilings, target
from cuda_l2.machine.cpu.ceilings import TRIES, Ceilings, kept, place

ZEN_5 = """\
processor : 0
cpu family	: 26
model		: 2
model name	: AMD EPYC
stepping	: 1
flags		: fpu avx2 fma f16c avx512f avx512vl avx512bw avx512_bf16 avx_vnni
"""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, own_cache) -> list[Ceilings]:
    """What the program that measures will say, the first one first."""
    script: list[Ceilings] = []
    monkeypatch.setattr(ceilings, "measure", lambda threads, flag: script.pop(0))
    return script


def test_a_quiet_measurement_is_kept_and_asked_for_no_more(measured: list[Ceilings]) -> None:
    measured += [Ceilings(70, 5, False), Ceilings(190, 30, True), Ceilings(9999, 9, True)]
    assert kept(2, "here", "") == Ceilings(190, 30, True) == kept(2, "here", "")
    assert len(measured) == 1, "two processes measured twice in all"
    assert kept(1, "here", "").gflops == 9999, "another number of threads"


def test_the_largest_counts_while_others_interrupt_and_the_next_process_tries_again(measured: list[Ceilings]) -> None:
    measured += [Ceilings(110, 20, False), Ceilings(70, 25, False), Ceilings(90, 5, False)]
    assert len(measured) == TRIES
    assert kept(2, "here", "") == Ceilings(110, 25, False)
    measured += [Ceilings(105, 24, True)]
    assert kept(2, "here", "") == Ceilings(110, 25, True)


def test_measuring_again_beside_other_work_lowers_nothing(measured: list[Ceilings]) -> None:
    measured += [Ceilings(205, 30, True), *[Ceilings(115, 9, False)] * TRIES]
    assert kept(2, "here", "").gflops == 205
    ceilings.again(2, "here")
    assert kept(2, "here", "") == Ceilings(205, 30, False)
    ceilings.again(3, "here")


@pytest.mark.parametrize("quiet", [True, False])
def test_doctor_and_json_say_that_other_work_ran_meanwhile(quiet, monkeypatch: pytest.MonkeyPatch, own_cache) -> None:
    monkeypatch.setattr(ceilings, "again", lambda *machine: None)
    here = target.detect()
    for dtype in ("float32", "bfloat16"):
        ceilings._write(place(here.cores, here.measured_as(dtype)[0]), Ceilings(100, 20, quiet))
    (said,) = [str(each) for each in doctor._cpu() if "measured peak" in str(each)]
    assert ("other work ran meanwhile: they may be higher" in said) is not quiet
    assert said.startswith("ok") is quiet
    assert here.environment()["peak_in_quiet"] is quiet, "as JSON says it"


@pytest.mark.parametrize("text", ["", "{}", '{"gflops": 0, "gbytes_per_s": 1, "quiet": true}', "[1]"])
def test_a_damaged_file_is_measured_again(text: str, measured: list[Ceilings]) -> None:
    path = place(2, "here")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    measured += [Ceilings(190, 30, True)]
    assert kept(2, "here", "").gflops == 190


def test_the_program_that_measures_says_two_figures() -> None:
    found = ceilings.measure(1, target.NATIVE)
    assert found.gflops > 0.1 and found.gbytes_per_s > 0.01


def test_two_processors_of_one_name_are_two_machines(tmp_path, monkeypatch) -> None:
    named = {}
    for family, text in ((26, ZEN_5), (25, ZEN_5.replace("26", "25"))):
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(target, "CPUINFO", tmp_path / "cpuinfo")
        found = target.detect.__wrapped__()
        assert (found.model, found.stepping, found.vector_bits) == ("AMD EPYC", f"{family}.2.1", 512)
        assert found.extensions == ("avx2", "avx_vnni", "avx512f", "avx512_bf16")
        named[family] = found.machine
    assert named[25] != named[26] and "26.2.1:avx2+avx_vnni+avx512f+avx512_bf16:" in named[26]
    assert dataclasses.replace(found, cache_bytes=(1, 2, 3)).machine != found.machine
