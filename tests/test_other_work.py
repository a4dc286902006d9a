"""measure/other_work.py: what others take of the cores is told apart from our own work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_l2.commands import doctor
from cuda_l2.machine.cpu import ceilings
from cuda_l2.measure import other_work
from cuda_l2.measure.clock import Clock
from cuda_l2.measure.other_work import OtherWork, noticed
from cuda_l2.records import BusyCores, Conditions
from cuda_l2.system import process_tree

BURN = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """counted(seconds a core was busy) writes what the kernel would say of this process's cores, and of one more."""
    cores = [0, 1]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))
    hundredths = os.sysconf("SC_CLK_TCK")

    def write(*fields: float) -> None:
        values = " ".join(str(round(seconds * hundredths)) for seconds in fields)
        rest = " ".join("9" for _ in fields)
        lines = ["cpu  1 2 3 4", *(f"cpu{core} {values}" for core in cores), f"cpu{max(cores) + 1} {rest}", "intr 5"]
        (tmp_path / "stat").write_text("\n".join(lines) + "\n")

    monkeypatch.setattr(other_work, "STAT", tmp_path / "stat")
    return write


def test_what_others_take_is_counted_and_ours_is_not(counted, monkeypatch) -> None:
    own_s, now = [100.0], [0.0]
    monkeypatch.setattr(process_tree, "own_seconds", lambda: own_s[0])
    cores = 2
    # user, nice, system, idle, waiting, interrupts, soft interrupts, stolen
    counted(100, 0, 0, 5, 5, 0, 0, 0)
    watch = OtherWork(Clock(lambda: now[0]))
    now[0] = 10.0
    counted(104, 1, 1, 90, 90, 1, 1, 2)  # ten seconds more on every core
    own_s[0] += 10.0 * cores - 5.0
    assert watch.found() == BusyCores(0.5, cores)
    assert noticed(Conditions(other_work=watch.found())) == (
        f"other work kept 0.5 of {cores} cores busy meanwhile: these times are less sure"
    )
    own_s[0] += 4.0
    assert noticed(Conditions(other_work=watch.found())) == "", "a tenth of a core is always taken"
    own_s[0] += 100.0
    assert watch.found().cores == 0.0, "clocks that do not agree"
    own_s[0] -= 200.0
    assert watch.found() == BusyCores(2.0, cores) and watch.found().share == 1.0, "no more than there are"


def test_what_ended_processes_took_stays_ours() -> None:
    """Whoever is killed below a process that is killed too is waited for by nobody here."""
    ready = f"{BURN}\nprint(flush=True)\ntime.sleep(600)"
    shell = subprocess.Popen(
        ["sh", "-c", '"$0" -c "$1" & wait', sys.executable, ready], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert shell.stdout and shell.stdout.readline() == b"\n"
    before = process_tree.own_seconds()
    process_tree.kill(shell.pid)
    shell.wait()
    shell.stdout.close()
    assert process_tree.own_seconds() >= before > process_tree.cpu_seconds(os.getpid()) + 0.4


@pytest.mark.parametrize(("cores", "mark", "says"), [(0.2, "ok", "10%"), (1.6, "--", "80%")])
def test_doctor_says_which_share_of_the_cores_others_keep_busy(cores, mark, says, counted, monkeypatch, typed) -> None:
    now, others = [0.0], iter([{os.getpid(): 1.0}, {os.getpid(): 1.0 + cores * doctor.WATCHED_S}])

    def sleep(seconds: float) -> None:
        now[0] += seconds
        counted(100 + seconds * cores / 2, 0, 0, 0, 0, 0, 0, 0)

    counted(100, 0, 0, 0, 0, 0, 0, 0)
    monkeypatch.setattr(doctor, "CLOCK", Clock(lambda: now[0], sleep))
    monkeypatch.setattr(ceilings, "again", lambda *machine: None)
    monkeypatch.setattr(process_tree, "own_seconds", lambda: 100.0)
    monkeypatch.setattr(process_tree, "seconds_of_others", lambda: next(others))
    status, out, _ = typed("doctor")
    (line,) = (line for line in out.splitlines() if "other work  " in line)
    assert status == 0 and line.startswith(f"{mark}  other work       keeps {says} of 2 cores busy"), out
    assert ("timings on the CPU wait, or end without figures" in line) is (mark == "--") is ("took 1.6 cores" in line)


@pytest.mark.parametrize("text", ["", "cpu 1 2 3\n", "cpu0 a b\n"])
def test_a_system_that_counts_nothing_says_nothing(text, tmp_path, monkeypatch) -> None:
    (tmp_path / "stat").write_text(text)
    monkeypatch.setattr(other_work, "STAT", tmp_path / "stat")
    assert OtherWork().found() is None and noticed(Conditions()) == ""
    monkeypatch.setattr(other_work, "STAT", tmp_path / "none")
    assert OtherWork().found() is None


def test_work_of_a_process_of_ours_is_our_own(counted) -> None:
    """On the kernel's own figures for processes; those for cores stand still."""
    counted(100, 0, 0, 0, 0, 0, 0, 0)
    watch = OtherWork()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    counted(100.2, 0, 0, 0, 0, 0, 0, 0)  # of each of two: less than what it took, and it has ended
    assert watch.found().cores == 0.0


def test_what_is_timed_for_a_report_says_so(typed, monkeypatch) -> None:
    """Baselines alone, and a candidate beside them."""
    monkeypatch.setattr(other_work, "NOTICED_CORES", -1.0)
    softmax = str(Path(__file__).with_name("task_cheats") / "honest_softmax.c")
    for arguments, status in (
        (["tasks", "softplus:rows=8,columns=33", "--baselines", "--protocol", "offline"], 0),
        (["check", softmax, "softmax:rows=8,columns=33"], 0),
    ):
        found, said, _ = typed(*arguments)
        assert found == status and f"of {len(os.sched_getaffinity(0))} cores busy" in said, arguments
