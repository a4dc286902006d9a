"""Processes that answer requests: who gets what, and what becomes of a request whose process dies or hangs."""

import os
import signal
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from pool_servants import FOLDER, Scripted
from waiting import wait_until

from cuda_l2.runs import pool as module
from cuda_l2.runs.pool import Pool
from cuda_l2.runs.workers import TRIES
from cuda_l2.system.errors import DeadlyError, UserError
from cuda_l2.system.line_process import LineProcess
from cuda_l2.system.lock import machine_lock
from cuda_l2.system.turns import Turns

NEVER_S = 1e6


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def pool(tmp_path, monkeypatch, said):
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    with Pool(["3", "5"], Scripted(tmp_path), said.append, NEVER_S) as opened:
        yield opened


def pids(path: Path) -> list[int]:
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def running(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_each_process_sees_its_own_gpu_first_and_then_another(pool, said, tmp_path) -> None:
    held = pool.begin("hangs")
    wait_until(lambda: pids(tmp_path / "hangs"))
    (others,) = {pool.begin(word).result() for word in ("one", "two", "three")}  # those of the other process
    assert others in ("3,5", "5,3") and f"GPU {others[0]}: two" in said
    pool.close()
    with pytest.raises(CancelledError):
        held.result()


@pytest.mark.parametrize("word", ["dies once", "hangs once"])
def test_what_a_process_had_in_flight_is_given_out_again(pool, said, tmp_path, word) -> None:
    again, others = pool.begin(word), [pool.begin(f"other {number}") for number in range(4)]
    if word == "hangs once":
        wait_until(lambda: pids(tmp_path / word))
        (hung,) = [each for each in pool._processes.values() if each._process.pid == pids(tmp_path / word)[0]]
        hung._end_late()  # as its limit does
    assert all(future.result() in ("3,5", "5,3") for future in (again, *others))
    first, second = pids(tmp_path / word)
    assert first != second
    why = "was killed by signal 9" if word == "dies once" else f"gave no answer for {NEVER_S:.0f} s"
    assert next(line for line in said if "given out again" in line).endswith(
        f"its process {why}; what it had in flight is given out again"
    )
    assert all(len(pids(tmp_path / f"other {number}")) == 1 for number in range(4))


def test_a_process_that_is_killed_from_outside_costs_what_it_had_in_flight(pool, said, tmp_path) -> None:
    again = pool.begin("hangs once")
    wait_until(lambda: pids(tmp_path / "hangs once"))
    os.kill(pids(tmp_path / "hangs once")[0], signal.SIGKILL)
    assert again.result() in ("3,5", "5,3")
    assert sum("was killed by signal 9" in line for line in said) == 1


@pytest.mark.parametrize(("word", "how"), [("deadly", "was killed by signal 9"), ("broken", "ended with status 1")])
def test_a_request_that_processes_die_of_is_an_error_and_the_pool_goes_on(pool, tmp_path, word, how) -> None:
    with pytest.raises(DeadlyError, match=f"{TRIES} processes died of it, one after the other; the last {how}"):
        pool.begin(word).result()
    assert len(set(pids(tmp_path / word))) == TRIES
    assert pool.begin("one").result() in ("3,5", "5,3")


def test_a_gpu_on_which_all_processes_die_is_left_out_while_another_works(pool, said, tmp_path) -> None:
    held = pool.begin("hangs on 5")
    while not pids(tmp_path / "held"):  # until GPU 5 has it
        wait_until(lambda begun=held: begun.done() or pids(tmp_path / "held"))
        held = pool.begin("hangs on 5") if held.done() else held
    full = [pool.begin("full") for _ in range(4)]
    wait_until(lambda: any("GPU 3: left out" in line for line in said))
    os.kill(pids(tmp_path / "held")[0], signal.SIGKILL)
    assert {future.result() for future in full} == {"5,3"}
    assert held.result() == "5,3"


def test_a_gpu_that_was_left_out_for_a_request_that_all_die_of_works_again(pool, said, tmp_path) -> None:
    while not pids(tmp_path / "held"):  # until GPU 5 has it
        held = pool.begin("hangs on 5")
        wait_until(lambda begun=held: begun.done() or pids(tmp_path / "held"))
    deadly = pool.begin("deadly")
    wait_until(lambda: any("GPU 3: left out" in line for line in said))
    os.kill(pids(tmp_path / "held")[0], signal.SIGKILL)
    assert isinstance(deadly.exception(), DeadlyError)
    for _ in range(2):
        pool.begin("hangs")
    wait_until(lambda: len(pids(tmp_path / "hangs")) == 2)


def test_a_reader_of_lines_that_has_gone_costs_no_request(tmp_path, monkeypatch) -> None:
    def say(line: str) -> None:
        raise BrokenPipeError

    monkeypatch.setenv("PYTHONPATH", FOLDER)
    with Pool(["3"], Scripted(tmp_path), say, NEVER_S) as pool:
        assert [pool.begin(word).result() for word in ("dies once", "one")] == ["3", "3"]


def test_what_cannot_be_asked_is_an_error_of_who_asked(pool) -> None:
    with pytest.raises(Exception, match="pickle"):
        pool.begin(lambda: None).result()
    assert pool.begin("one").result() in ("3,5", "5,3")


def test_the_end_of_a_pool_ends_what_its_processes_have_started(pool, tmp_path) -> None:
    pool.begin("starts")
    wait_until(lambda: pids(tmp_path / "held"))
    pool.close()
    wait_until(lambda: not running(pids(tmp_path / "held")[0]))


def test_a_failure_of_the_machine_is_one_line_and_what_was_in_flight_is_given_out_again(pool, said, tmp_path) -> None:
    assert pool.begin("fails once").result() in ("3,5", "5,3")
    assert len(set(pids(tmp_path / "fails once"))) == 2
    (line,) = [line for line in said if not line.endswith(": fails once")]
    assert line[len("GPU 3: ") :] == (
        "its process ended: the machine failed: the driver's own words; `cuda-l2 doctor` says what it has;"
        " what it had in flight is given out again"
    )


def test_processes_that_the_machine_fails_say_nothing_about_a_request(pool, tmp_path) -> None:
    failure = pool.begin("fails").exception()
    assert isinstance(failure, UserError) and not isinstance(failure, DeadlyError)
    assert "3 processes ended, one after the other; the last ended: the machine failed" in str(failure)
    assert len(pids(tmp_path / "fails")) == TRIES


def test_the_end_of_a_pool_does_not_wait_for_what_completes_a_request(pool, tmp_path) -> None:
    begun, ended, before = threading.Event(), threading.Event(), list[bool]()

    def complete(word: str) -> str:
        begun.set()
        before.append(ended.wait(30.0))
        return word

    waits = pool.begin("one", complete)
    begun.wait()
    pool.close()
    ended.set()
    assert isinstance(waits.exception(), CancelledError)
    assert before == [True] and not (tmp_path / "one").exists()


def test_an_error_for_users_is_an_answer(pool, said) -> None:
    with pytest.raises(UserError, match="no such word"):
        pool.begin("no").result()
    assert not any("given out again" in line for line in said)


def test_the_end_of_a_pool_ends_its_processes(pool, tmp_path) -> None:
    held = [pool.begin("hangs"), pool.begin("hangs")]
    waiting = pool.begin("one")
    wait_until(lambda: len(pids(tmp_path / "hangs")) == 2)
    pool.close()
    assert not any(map(running, pids(tmp_path / "hangs")))
    assert all(isinstance(future.exception(), CancelledError) for future in held)
    assert not (tmp_path / "one").exists() and not waiting.running()


@pytest.fixture
def limits(monkeypatch) -> list[float]:
    """The limits of time that began."""
    began, limit = list[float](), LineProcess._limit
    monkeypatch.setattr(LineProcess, "_limit", lambda process, s: began.append(s) or limit(process, s))
    return began


@pytest.mark.parametrize("word", ["locked", "turn"])
def test_a_process_says_that_it_waits_for_the_lock_which_is_no_hang(monkeypatch, pool, limits, tmp_path, word) -> None:
    monkeypatch.setattr(module, "MAIN", "quick_pool")
    with Turns(tmp_path / "gpu") as turns, turns.taken(alone=True), machine_lock():
        locked = pool.begin(word)
        wait_until(lambda: len(limits) > 3 or locked.done())
        assert not locked.done()
    assert locked.result() in ("3,5", "5,3")


def test_a_process_that_waits_has_all_its_time_again(monkeypatch, limits) -> None:
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    process, said = LineProcess("pool_lines"), list[str]()
    assert process.ask({}, NEVER_S, said.append) == {"answer": 1}
    assert (limits, said) == ([NEVER_S] * 2, ["a", "b"])
    process.close()
