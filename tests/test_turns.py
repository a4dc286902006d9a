"""Processes that judge on one GPU: several verify at once, and who is to be alone is."""

import contextlib
import fcntl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from cuda_l2.system import lock
from cuda_l2.system.turns import ALONE, Turns


def locked(path: Path, kind: int) -> bool:
    """Whether somebody holds a file so that it cannot be locked in this way."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def beside(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "0000-65-00.0"


def test_turns_beside_others_are_taken_at_once(file) -> None:
    both = threading.Barrier(2)

    def meet() -> None:
        with Turns(file) as turns, turns.taken():
            both.wait()

    threads = [beside(meet), beside(meet)]
    for thread in threads:
        thread.join()


def test_who_is_to_be_alone_comes_before_the_next_turn_of_another(file) -> None:
    events = list[str]()
    gate = file.with_name(f"{file.name} gate")

    def alone() -> None:
        with Turns(file) as turns, turns.taken(alone=True):
            events.append("alone")

    with Turns(file) as turns, turns.taken():
        other = beside(alone)
        wait_until(lambda: locked(gate, fcntl.LOCK_EX))  # it waits
        events.append("first")
        with turns.taken():
            events.append("second")
    other.join()
    assert events == ["first", "alone", "second"]


def test_a_turn_alone_within_another_leaves_that_one_behind(file) -> None:
    with Turns(file) as turns:
        with turns.taken():
            with turns.taken(alone=True):
                assert locked(file, fcntl.LOCK_SH)
            assert locked(file, fcntl.LOCK_EX) and not locked(file, fcntl.LOCK_SH)
            with pytest.raises(ZeroDivisionError), turns.taken(alone=True):
                raise ZeroDivisionError
            assert not locked(file, fcntl.LOCK_SH)
        assert not locked(file, fcntl.LOCK_EX)


def test_without_a_file_all_turns_are_alone() -> None:
    with ALONE.taken(), ALONE.taken(alone=True):
        assert not ALONE.several


def test_a_gpu_is_held_by_several_of_one_run_or_by_one(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CUDA_L2_CACHE", str(tmp_path))
    held = threading.Event()
    gate, file = tmp_path / "gpu-1.gate", tmp_path / "gpu-1.lock"

    def alone() -> None:
        with lock.machine_lock("1"):
            held.set()

    with lock.machine_lock("1", several=True):
        with lock.machine_lock("1", several=True):
            assert locked(file, fcntl.LOCK_EX)
        other = beside(alone)
        wait_until(lambda: locked(gate, fcntl.LOCK_EX))
        assert not held.is_set()
    other.join()
    assert held.is_set()


def test_who_waits_for_the_whole_machine_comes_before_the_next_on_a_gpu(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CUDA_L2_CACHE", str(tmp_path))
    waits = threading.Event()

    @contextlib.contextmanager
    def step(name: str) -> Iterator[None]:
        waits.set()
        yield

    def whole() -> None:
        with lock.machine_lock():
            pass

    monkeypatch.setattr(lock, "step", step)
    with lock.machine_lock("1", several=True):
        other = beside(whole)
        waits.wait()
        assert locked(tmp_path / "machine.gate", fcntl.LOCK_EX)
    other.join()
