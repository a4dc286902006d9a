"""Every cheat and control of the CPU's corpora goes the whole way: build, verify, measure."""

import platform
import re
import tomllib
from pathlib import Path

import pytest
from conftest import CHEATS
from drawing import cases, is_honest

from cuda_l2.machine.cpu import worker as cpu_worker
from cuda_l2.machine.cpu.arena import Arena
from cuda_l2.verify import _cpu as cpu_session
from cuda_l2.verify import structure

TASK_CHEATS = Path(__file__).with_name("task_cheats")
KINDS_FOLDER = Path(__file__).with_name("cheat_kinds")
SHAPE = "45x40x64"

pytestmark = pytest.mark.usefixtures("many_launches")


def require_ends_as_said(path: Path, judge, monkeypatch) -> None:
    source = path.read_text()
    if "x86-64 only" in source and platform.machine() != "x86_64":
        pytest.skip("holds x86-64 machine code")
    expected = re.search(r"expect: ([\w -]+?) \*/", source).group(1).split()
    if "timed-out" in expected:
        monkeypatch.setattr(cpu_session, "LAUNCH_TIMEOUT_S", 1.0)
    task = re.search(r"\* task: (\S+)", source)
    trial = judge(source, task.group(1) if task else SHAPE)
    assert trial.status in expected, trial.reason
    if trial.status != "measured":
        assert trial.reason and trial.speedup == 0.0 and trial.reward < 0


@pytest.mark.corpus(4)
@pytest.mark.parametrize("path", cases(sorted(CHEATS.glob("*.c")), is_honest, lambda path: path.stem))
def test_a_cheat_ends_as_its_file_says(path, judge, monkeypatch) -> None:
    require_ends_as_said(path, judge, monkeypatch)


@pytest.mark.corpus(3)
@pytest.mark.parametrize("path", cases(sorted(TASK_CHEATS.glob("*.c")), is_honest, lambda path: path.stem))
def test_a_cheat_for_another_task_ends_as_its_file_says(path, judge, monkeypatch) -> None:
    require_ends_as_said(path, judge, monkeypatch)


JUDGEMENTS = 3
"""In one of these the check that a kind is for must find it: in others an earlier one may, by what is drawn for it."""
KINDS = tomllib.loads((KINDS_FOLDER / "kinds.toml").read_text())
PLACES = ("GLOBALS", "BEFORE", "PACK", "TASK", "ELEMENT", "AFTER")


def kind_source(name: str) -> str:
    """The body of the kinds with one kind's text at its places."""
    kind, text = {"PACK": "pack(&s);"} | KINDS[name], (KINDS_FOLDER / "body.c").read_text()
    if "text" in kind:
        return text[: text.index("GLOBALS")] + kind["text"]
    return re.sub(rf"\b({'|'.join(PLACES)})\b", lambda match: kind.get(match[1], ""), text)


@pytest.mark.corpus(3)
@pytest.mark.parametrize("name", cases(sorted(KINDS), lambda name: name.startswith("honest"), str))
def test_a_kind_of_a_review_ends_as_said(name, judge, target, monkeypatch) -> None:
    kind = KINDS[name]
    if kind.get("only") == "x86_64" and platform.machine() != "x86_64":
        pytest.skip("what it does is said otherwise on this processor")
    if kind.get("only") == "gcc" and "clang" in target.compiler_version:
        pytest.skip("clang has no nested functions")
    if kind.get("without") in target.extensions:
        pytest.skip("this processor has an instruction for it")
    if kind.get("expect") == "timed-out":
        monkeypatch.setattr(cpu_session, "LAUNCH_TIMEOUT_S", 1.0)
    monkeypatch.setattr(structure, "DRAWN", len(structure.PATTERNS))
    expected, accepted, by_chance = kind.get("expect", "measured").split(), 0, 0
    while True:
        trial = judge(kind_source(name), kind.get("shape", "32x48x64"))
        said = f"{trial.reason} {trial.verdict.check if trial.verdict else ''}"
        if trial.status in expected and kind.get("reason", "") in said:
            return
        accepted += trial.status == "measured"
        by_chance += trial.status != "measured"
        assert accepted < kind.get("judgements", 1), "it was not found"
        assert "measured" not in expected and by_chance < JUDGEMENTS, trial.reason


def test_where_the_stack_cannot_be_seen_static_variables_are_asked_all_the_same(judge, monkeypatch) -> None:
    monkeypatch.setattr(cpu_worker, "READ", "")
    assert "state in static variables" in judge(kind_source("counts_in_a_static"), "32x48x64").reason
    assert judge(kind_source("counts_in_a_deep_array"), "32x48x64").status == "measured"


def test_a_row_of_launches_lies_wherever_timed_ones_do(judge, monkeypatch) -> None:
    rows = []
    overtaken = cpu_session.CpuSession.launch_overtaken

    def recorded(session, case, other):
        found = list(overtaken(session, case, other))
        rows.append((sorted(session.worker.collect()), len(found), session.arena.slots))
        return iter(found)

    monkeypatch.setattr(cpu_session.CpuSession, "launch_overtaken", recorded)
    assert judge((CHEATS / "honest.c").read_text(), SHAPE).status == "measured"
    assert rows and all(slots == list(range(count)) and found == count >= 64 for slots, found, count in rows)
    rows.clear()
    monkeypatch.setattr(cpu_session, "ROW_S", 0.0)  # as where a launch takes long
    assert judge((CHEATS / "honest.c").read_text(), SHAPE).status == "measured"
    assert rows and all(len(slots) == found == cpu_session.LEAST_IN_A_ROW for slots, found, _ in rows)


def test_what_lies_beside_tensors_is_drawn_anew_for_launches(judge, monkeypatch) -> None:
    drawn, at_launches = [], []
    guard, launch = Arena.guard, cpu_session.CpuSession.launch

    def recorded(arena, slot, **how):
        drawn.append(slot)
        guard(arena, slot, **how)

    def launched(session, *given, **how):
        before = len(drawn)
        outputs = launch(session, *given, **how)
        at_launches.append(len(drawn) - before)
        return outputs

    monkeypatch.setattr(Arena, "guard", recorded)
    monkeypatch.setattr(cpu_session.CpuSession, "launch", launched)
    assert judge((CHEATS / "honest.c").read_text(), SHAPE).status == "measured"
    assert at_launches.count(1) > 10


def test_no_reason_leaks_the_private_file(judge) -> None:
    secret = Path("/etc/passwd").read_text().splitlines()[0]
    for path in CHEATS.glob("private_*.c"):
        trial = judge(path.read_text(), SHAPE)
        assert secret not in trial.reason + trial.build.log


def test_a_wrong_element_is_named(judge) -> None:
    trial = judge((CHEATS / "zero_shortcut.c").read_text(), SHAPE)
    assert trial.verdict.element is not None and str(trial.verdict.element) in trial.reason
