"""execute/: the runner holds a hostile library even where no rule refused it, and the arena sees every stray write."""

import ctypes
import platform
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from cuda_l2.contract import CpuContract
from cuda_l2.evaluator import Evaluator
from cuda_l2.execute.arena import POISON, Arena, Call
from cuda_l2.execute.worker import Fault, Worker
from cuda_l2.library.kernel import POOL
from cuda_l2.native import compiled
from cuda_l2.records import Build, BuildStatus, Candidate, Gemm, VerdictStatus

GEMM = Gemm(8, 4, 2)
HEAD = "#include <stdint.h>\n#include <stdlib.h>\n#include <unistd.h>\n#include <sys/mman.h>\n#include <sys/socket.h>\n"
SIGNATURE = (
    "void gemm(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c, void *w,"
    " void (*parallel_for)(int64_t, void (*)(void *, int64_t), void *))"
)


@pytest.fixture
def arena():
    with Arena(GEMM, windows=4, slots=3, workspace_bytes=4096) as made:
        yield made


def library(folder: Path, body: str, before: str = "") -> Path:
    """A library that no rule of build/ has looked at."""
    source, out = folder / "hostile.c", folder / "hostile.so"
    source.write_text(f"{HEAD}{before}\n{SIGNATURE} {{ {body} }}\n")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-w", str(source), "-o", str(out)], check=True)
    return out


@pytest.mark.parametrize(
    ("body", "before", "status"),
    [
        ("for (;;) fork();", "", VerdictStatus.FORBIDDEN),
        ("socket(AF_INET, SOCK_STREAM, 0);", "", VerdictStatus.FORBIDDEN),
        ("for (;;) *(volatile char *)mmap(0, 1 << 30, 3, 34, -1, 0) = 1;", "", VerdictStatus.FORBIDDEN),
        ("execl(\"/bin/sh\", \"sh\", (char *)0);", "", VerdictStatus.FORBIDDEN),
        ("kill(getppid(), 9);", "", VerdictStatus.FORBIDDEN),
        ("write(1, \"D\", 1);", "", VerdictStatus.FORBIDDEN),
        ("exit(0);", "", VerdictStatus.CRASHED),
        ("abort();", "", None),
        ("*(volatile int *)8 = 1;", "", VerdictStatus.CRASHED),
        ("for (;;) {}", "", VerdictStatus.TIMED_OUT),
        ("", "__attribute__((constructor)) static void f(void) { fork(); }", VerdictStatus.FORBIDDEN),
        ("", "__attribute__((constructor)) static void f(void) { for (;;) {} }", None),
    ],
)  # fmt: skip
def test_a_hostile_library_ends_itself_only(tmp_path, arena, monkeypatch, body, before, status) -> None:
    monkeypatch.setattr("cuda_l2.execute.worker.START_TIMEOUT_S", 2.0)
    artifact = library(tmp_path, body, before)
    with pytest.raises(Fault) as fault, Worker(arena, artifact, CpuContract("gemm", 2, "0")) as worker:
        worker.launch(Call(), 1.0)
    assert status is None or fault.value.status is status, fault.value.reason
    assert fault.value.reason


def test_a_library_that_opens_files_at_load_finds_none(tmp_path, arena) -> None:
    secret = tmp_path.parent / "secret.txt"
    secret.write_text("1")
    reader = (
        f'static int found; __attribute__((constructor)) static void f(void) {{ found = access("{secret}", 0) == 0; }}'
    )
    artifact = library(tmp_path, "c[0] = found;", reader)
    try:
        with Worker(arena, artifact, CpuContract("gemm", 1, "0")) as worker:
            worker.launch(Call(), 5.0)
            assert arena.output()[0, 0] == 0
    except Fault as fault:
        assert fault.status is VerdictStatus.FORBIDDEN


def test_a_missing_entry_is_named(tmp_path, arena) -> None:
    with pytest.raises(Fault, match="other"), Worker(arena, library(tmp_path, ""), CpuContract("other", 1, "0")):
        pass


def test_a_batch_runs_every_launch_on_its_own_operands(tmp_path, arena) -> None:
    artifact = library(tmp_path, "for (int i = 0; i < m * n; ++i) c[i] = a[0] + b[0];")
    arena.a[:] = np.arange(arena.a.size)
    arena.b[:] = 1000
    arena.poison_outputs(3)
    with Worker(arena, artifact, CpuContract("gemm", 1, "0")) as worker:
        worker.prepare([Call(0, 0, 0), Call(1, 0, 1), Call(3, 0, 2)], 5.0)
        assert worker.run(5.0) > 0
    assert [int(arena.output(slot)[0, 0]) for slot in range(3)] == [1000, 1032, 1096]
    assert arena.gaps_intact(3)


def test_guards_and_gaps_see_single_bytes(arena) -> None:
    assert arena.guards_intact()
    for region in [*arena._guards, arena._workspace_guard]:
        for at in (region.offset, region.offset + region.size - 1):
            arena._bytes[at] ^= 1
            assert not arena.guards_intact()
            arena._bytes[at] ^= 1
    arena.poison_outputs(3)
    arena._all_slots[arena.slot_bytes // 2 - 1] = 0
    assert not arena.gaps_intact(3)


def test_every_byte_of_the_arena_outside_regions_is_guarded(arena) -> None:
    covered = np.zeros(arena.size, dtype=bool)
    regions = [arena._table, arena._a, arena._b, arena._c, arena._workspace, *arena._guards]
    for region in regions:
        covered[region.offset : region.offset + region.size] = True
    assert covered[: arena._workspace.offset + arena._workspace.size + 4096].all()


def test_poison_is_a_nan() -> None:
    assert np.isnan(np.array([POISON], dtype=np.uint16).view(np.float16))[0]


def test_the_pool_runs_every_task_once_whatever_the_count() -> None:
    pool = ctypes.CDLL(str(compiled(POOL, "-shared", "-fPIC", "-pthread")))
    assert pool.pool_start(3) == 0
    task_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
    for count in (0, 1, 2, 3, 7, 100):
        for _ in range(20):
            seen: list[int] = []
            task = task_type(lambda context, index: seen.append(index))  # noqa: B023
            pool.pool_parallel_for(ctypes.c_int64(count), task, None)
            assert sorted(seen) == list(range(count))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the runner knows two architectures")
def test_workers_leave_no_process_behind(tmp_path, arena) -> None:
    artifact = library(tmp_path, "")
    with Worker(arena, artifact, CpuContract("gemm", 2, "0")) as worker:
        worker.launch(Call(), 5.0)
        group = worker._process.pid
    for _ in range(50):
        states = subprocess.run(["ps", "-o", "stat=", "-g", str(group)], capture_output=True, text=True).stdout.split()
        if all(state.startswith("Z") for state in states):  # a zombie waits for init, and runs no more
            return
        time.sleep(0.1)
    raise AssertionError(f"processes left behind: {states}")


@pytest.mark.parametrize("stage", ["verify", "measure"])
def test_an_acknowledgement_before_the_work_is_done_is_of_no_use(tmp_path, stage, target, baselines) -> None:
    """The library finds its acknowledgement pipe among the runner's arguments and stops the parent's clock early."""
    early = (
        'static int launches; if (++launches > {after}) {{ write(atoi(environ[-2]), "D", 1); usleep_by_counting(); }}'
    )
    honest = "for (int64_t i = 0; i < m; ++i) for (int64_t j = 0; j < n; ++j) { float s = 0;"
    honest += " for (int64_t p = 0; p < k; ++p) s += (float)((const _Float16 *)a)[i * k + p] * (float)((const _Float16 *)b)[p * n + j];"
    honest += " ((_Float16 *)c)[i * n + j] = (_Float16)s; }"
    before = "extern char **environ; static void usleep_by_counting(void) { for (volatile long i = 0; i < 30000000; ++i) {} }"
    artifact = library(tmp_path, early.format(after=0 if stage == "verify" else 60) + honest, before)
    candidate = Candidate('/* cuda-l2\ntarget = "cpu"\n*/')
    gemm = Gemm(32, 24, 16)
    build = Build(candidate.id, BuildStatus.BUILT, artifact=str(artifact))
    with Evaluator(gemm, target, baselines) as evaluator:
        trial = evaluator.judge(candidate, build)
    assert trial.status in ("incorrect", "wrong-output", "unhygienic", "forbidden"), trial.reason
