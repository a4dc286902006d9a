"""Whose fault it is: the candidate's, which is a verdict, or the machine's, which never is."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver

from cuda_l2.evaluator import Evaluator
from cuda_l2.machine import messages
from cuda_l2.machine.cuda.driver import DriverError
from cuda_l2.measure.baselines._base import library_baselines
from cuda_l2.measure.libraries import IDLE_SIZES
from cuda_l2.records import Candidate, Gemm
from cuda_l2.system.errors import MachineError

CORPUS = Path(__file__).with_name("cuda_cheats")


@pytest.mark.parametrize(
    ("call", "status", "of_machine"),
    [
        ("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", True),
        ("cuMemMap", "CUDA_ERROR_MAP_FAILED", True),
        ("cuStreamSynchronize", "CUDA_ERROR_ECC_UNCORRECTABLE", True),
        ("cuStreamSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS", False),
        ("cuStreamSynchronize", "CUDA_ERROR_LAUNCH_FAILED", False),
        ("cuModuleLoadData", "CUDA_ERROR_INVALID_IMAGE", False),
        ("launch of gemm", "CUDA_ERROR_OUT_OF_MEMORY", False),  # it asks for too much local memory
    ],
)
def test_a_driver_error_says_whose_it_is(call: str, status: str, of_machine: bool) -> None:
    assert DriverError(call, driver.CUresult[status]).of_machine is of_machine


def test_a_message_is_met_whenever_it_comes() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert not messages.wait(ours, 0.01)
        for pause_s in (0.0, messages.SPIN_S / 3, messages.SPIN_S * 8):
            later = threading.Timer(pause_s, theirs.send, (b"{}",))
            later.start()
            assert messages.wait(ours, 600.0)
            assert ours.recv(16) == b"{}"
            later.join()
        theirs.close()
        assert messages.wait(ours, 600.0)  # that the other end is gone is for the caller to find
        assert ours.recv(16) == b""


@pytest.fixture
def judge_again(gpu: Any) -> Iterator[Callable[[], None]]:
    """Judges an honest kernel, which must be measured; it was before."""
    with Evaluator(Gemm(256, 256, 256), gpu) as evaluator:
        candidate = Candidate((CORPUS / "honest_fma.cu").read_text())
        (build,) = evaluator.build([candidate])

        def judge() -> None:
            trial = evaluator.judge(candidate, build)
            assert trial.status == "measured", trial.reason

        judge()
        yield judge


@pytest.mark.gpu
def test_a_worker_that_is_killed_costs_no_candidate(gpu: Any, judge_again: Callable[[], None]) -> None:
    """As by the kernel where the host has no memory left: the candidate is judged in another one."""
    os.kill(gpu.workers._used[False]._process.pid, signal.SIGKILL)
    judge_again()


@pytest.mark.gpu
def test_memory_that_cannot_be_had_is_no_verdict(gpu: Any, judge_again: Callable[[], None]) -> None:
    worker = gpu.workers._used[False]
    with pytest.raises(MachineError, match="out of memory"):
        worker.call("evict", 10.0, size=1 << 45)
    assert not worker.alive
    judge_again()


@pytest.mark.gpu
def test_what_is_made_for_a_size_is_forgotten_once_enough_others_came(gpu: Any) -> None:
    libraries, sizes = gpu.libraries, [Gemm(8, 8, 8 * i) for i in range(1, IDLE_SIZES + 3)]
    with contextlib.ExitStack() as held:
        for gemm in sizes:
            libraries.hold(gemm)
            held.callback(libraries.release, gemm)
            library_baselines(libraries, gemm)
        known = {gemm for gemm, _ in libraries._products}
        assert set(sizes) <= known, "nothing that is held is forgotten"
    known = {gemm for gemm, _ in libraries._products}
    assert len(known & set(sizes)) == IDLE_SIZES
