"""machine/cpu: the runner holds a hostile library even where no rule refused it, and the arena sees every stray write."""

import ctypes
import fcntl
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from waiting import require_gone

import cuda_l2
from cuda_l2.contract import CpuContract
from cuda_l2.evaluator import Evaluator
from cuda_l2.machine._base import Fault
from cuda_l2.machine.cpu import worker
from cuda_l2.machine.cpu.arena import Arena, CandidateMemory
from cuda_l2.machine.cpu.worker import Worker, writable
from cuda_l2.machine.fills import POISONS
from cuda_l2.measure.torch_baselines import TorchBaselines
from cuda_l2.records import Build, BuildStatus, Candidate, Gemm, VerdictStatus
from cuda_l2.system import lock, paths, process_tree
from cuda_l2.system.native import compiled

POOL = Path(cuda_l2.__file__).parent / "machine" / "cpu" / "pool.c"

GEMM = Gemm(8, 4, 2)
HEAD = "#include <stdint.h>\n#include <stdlib.h>\n#include <unistd.h>\n#include <sys/mman.h>\n#include <sys/socket.h>\n"
SIGNATURE = (
    "void gemm(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c, void *w,"
    " void (*parallel_for)(int64_t, void (*)(void *, int64_t), void *))"
)


@pytest.fixture
def arena():
    with Arena([GEMM], slots=3, workspace_bytes=4096) as made:
        yield made


def opened(arena: Arena, artifact: Path, terms: CpuContract) -> Worker:
    """A worker on the arena."""
    return Worker(CandidateMemory(arena, terms), artifact, terms)


def library(folder: Path, body: str, before: str = "") -> Path:
    """A library that no rule of build/ has looked at."""
    source, out = folder / "hostile.c", folder / "hostile.so"
    source.write_text(f"{HEAD}{before}\n{SIGNATURE} {{ {body} }}\n")
    subprocess.run(
        [*paths.compiler_command(), "-O1", "-shared", "-fPIC", "-w", str(source), "-o", str(out)], check=True
    )
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
    if "for (;;) {}" in before:
        monkeypatch.setattr("cuda_l2.machine.cpu.worker.START_TIMEOUT_S", 2.0)
    artifact = library(tmp_path, body, before)
    with pytest.raises(Fault) as fault, opened(arena, artifact, CpuContract("gemm", 2, "0")) as worker:
        worker.launch(0, 1.0 if status is VerdictStatus.TIMED_OUT else 20.0)
    assert status is None or fault.value.status is status, fault.value.reason
    assert fault.value.reason


@pytest.mark.parametrize(("waits", "gives_up_s"), [(0.0, 10.0), (0.9, 55.0), (0.999, 55.0)])
def test_a_launch_hangs_by_the_time_in_which_it_had_a_core(tmp_path, arena, monkeypatch, waits, gives_up_s) -> None:
    """waits: share of the time for which one of its threads waits for a core."""
    now_s = [0.0]

    def nothing_comes(reads, writes, errors, seconds: float):
        now_s[0] += seconds
        return [], [], []

    artifact = library(tmp_path, "for (;;) {}")
    with opened(arena, artifact, CpuContract("gemm", 1, "0")) as candidate, monkeypatch.context() as patch:
        patch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now_s[0], perf_counter=lambda: now_s[0]))
        patch.setattr(worker, "select", SimpleNamespace(select=nothing_comes))
        patch.setattr(process_tree, "queues_s", lambda root: {1: 7.0, 2: waits * now_s[0]})
        with pytest.raises(Fault, match=r"did not finish within 10\.0 s"):
            candidate.launch(0, 10.0)
    assert now_s[0] == pytest.approx(gives_up_s, rel=0.01)


@pytest.mark.skipif(
    tuple(map(int, platform.release().split(".")[:2])) < (5, 14), reason="older systems map pages when first used"
)
def test_no_launch_of_a_new_process_waits_for_a_page(tmp_path) -> None:
    gemm, slots = Gemm(64, 64, 64), 64
    artifact = library(tmp_path, "for (int64_t i = 0; i < m * n; ++i) c[i] = a[i % (m * k)] + b[i % (k * n)];")
    with (
        Arena([gemm], slots=slots, workspace_bytes=4096) as made,
        opened(made, artifact, CpuContract("gemm", 1, "0")) as candidate,
    ):

        def faults() -> int:
            return int(Path(f"/proc/{candidate._pid}/stat").read_text().rsplit(")", 1)[1].split()[7])

        candidate.launch(0, 20.0)
        before = faults()
        candidate.prepare(range(1, slots))
        candidate.run(20.0)
        assert faults() - before < 2 * slots, "a slot has six pages and more"


def test_a_library_that_opens_files_at_load_finds_none(tmp_path, arena) -> None:
    secret = tmp_path.parent / "secret.txt"
    secret.write_text("1")
    reader = (
        f'static int found; __attribute__((constructor)) static void f(void) {{ found = access("{secret}", 0) == 0; }}'
    )
    artifact = library(tmp_path, "c[0] = found;", reader)
    try:
        with opened(arena, artifact, CpuContract("gemm", 1, "0")) as worker:
            worker.launch(0, 60.0)
            assert arena.tensor(0, GEMM.outputs[0])[0, 0] == 0
    except Fault as fault:
        assert fault.status is VerdictStatus.FORBIDDEN


def test_a_missing_entry_is_named(tmp_path, arena) -> None:
    with pytest.raises(Fault, match="other"), opened(arena, library(tmp_path, ""), CpuContract("other", 1, "0")):
        pass


def test_a_batch_runs_every_launch_on_its_own_operands(tmp_path, arena) -> None:
    artifact = library(tmp_path, "for (int i = 0; i < m * n; ++i) c[i] = a[0] + b[0];")
    for slot in range(3):
        a, b = arena.given(slot).values()
        a.view(torch.int16)[0, 0], b.view(torch.int16)[0, 0] = slot + 1, 10 * (slot + 1)
    arena.poison_outputs(range(3))
    with opened(arena, artifact, CpuContract("gemm", 1, "0")) as worker:
        worker.prepare([2, 0, 1])
        assert worker.run(60.0) > 0
    assert [int(arena.tensor(slot, GEMM.outputs[0]).view(torch.int16)[0, 0]) for slot in range(3)] == [11, 22, 33]
    assert arena.gaps_intact()


TAKEN_OVER = """
extern char **environ;
struct call { int64_t m, n, k, a, b, c, w; };
struct command { int64_t table, count, nonce; };
static void honest(int64_t m, int64_t n, int64_t k, const _Float16 *a, const _Float16 *b, _Float16 *c) {
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
            float sum = 0;
            for (int64_t p = 0; p < k; ++p) sum += (float)a[i * k + p] * (float)b[p * n + j];
            c[i * n + j] = (_Float16)sum;
        }
}
static void answer(char *arena, struct command *command) {
    const struct call *call = (const struct call *)(arena + command->table);
    for (int64_t i = 0; i < command->count; ++i, ++call)
        honest(call->m, call->n, call->k, (void *)(arena + call->a), (void *)(arena + call->b), (void *)(arena + call->c));
}
/* Never returns to the runner: answers its commands itself. The descriptors are the runner's last arguments, and the
 * first launch's operands lie at known places of the arena. */
static void take_over(char *arena) {
    int commands = atoi(environ[-3]), acks = atoi(environ[-2]);
    for (;;) {
        struct command command = {0};
        BEFORE
        if (read(commands, &command, sizeof command) <= 0) exit(0);
        AFTER
    }
}
"""
HONEST = "honest(m, n, k, (const _Float16 *)a, (const _Float16 *)b, (_Float16 *)c);"
ENTER = (
    "static int launches; " + HONEST + " if (++launches < 30) return;"
    " char *arena = (char *)a - {a_offset};"
    " int64_t nonce = 0; for (volatile int64_t *p = (volatile int64_t *)__builtin_frame_address(0); !nonce; ++p)"
    " if (p[0] == {table} && p[1] == 1) nonce = p[2];"  # the runner's command is on its stack
    " write(atoi(environ[-2]), &nonce, 8); take_over(arena);"
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "int64_t none = 7; write(acks, &none, 8); answer(arena, &command);"),
        ("", "write(acks, &command.nonce, 8); write(acks, &command.nonce, 8); answer(arena, &command);"),
        ("", "write(acks, &command.nonce, 8); for (volatile long i = 0; i < 3000000; ++i) {} answer(arena, &command);"),
        ("for (volatile long i = 0; i < 30000000; ++i) {}", "answer(arena, &command); write(acks, &command.nonce, 8);"),
        ("", 'answer(arena, &command); write(acks, "D", 1);'),
        ("", 'answer(arena, &command); write(acks, "E", 1); for (;;) {}'),
    ],
    ids=["without the number", "twice", "before the work", "works while idle", "a byte", "an error, then silence"],
)
@pytest.mark.full
def test_a_candidate_that_takes_over_the_conversation_gains_nothing(tmp_path, rig, monkeypatch, before, after) -> None:
    gemm = Gemm(32, 24, 16)
    with Evaluator(gemm, rig) as evaluator:
        monkeypatch.setattr(evaluator._bench._arena, "select", lambda task: None)  # would lay tensors out anew
        offset, table = evaluator._bench._arena.offsets(0)[0], evaluator._bench._arena._table.start
        code = TAKEN_OVER.replace("BEFORE", before).replace("AFTER", after)
        enter = ENTER.replace("{a_offset}", str(offset)).replace("{table}", str(table))
        candidate = Candidate('/* cuda-l2\ntarget = "cpu"\n*/' + before + after)
        build = Build(candidate.id, BuildStatus.BUILT, artifact=str(library(tmp_path, enter, code)))
        trial = evaluator.judge(candidate, build)
    assert trial.status in ("forbidden", "wrong-output", "crashed", "timed-out", "incorrect", "unhygienic")
    assert trial.reward < 0, trial.reason


FAULTS = {
    "writes what is there": ("((volatile uint16_t *)a)[1] = a[1];", "writes to its inputs"),
    "behind B": ("c[0] = b[m * 64];", "outside its tensors"),
    "before A": ("c[0] = a[-2048];", "outside its tensors"),
    "behind C": ("c[m * n + 32] = 1;", "outside its tensors"),
    "far behind the workspace": ("((char *)w)[1 << 20] = 1;", "outside its tensors"),
    "no memory at all": ("*(volatile int *)8 = 1;", "ended by SIGSEGV"),
}


@pytest.mark.parametrize(("body", "reason"), FAULTS.values(), ids=FAULTS)
def test_a_fault_says_what_was_touched(tmp_path, arena, body, reason) -> None:
    terms = CpuContract("gemm", 1, "100")
    with opened(arena, library(tmp_path, body), terms) as worker, pytest.raises(Fault, match=reason):
        worker.launch(0, 60.0)


OF_A_PARENT = """
import signal
from pathlib import Path
from cuda_l2.contract import CpuContract
from cuda_l2.machine.cpu.arena import Arena, CandidateMemory
from cuda_l2.machine.cpu.worker import Worker
from cuda_l2.measure.torch_baselines import TorchBaselines
from cuda_l2.records import Gemm
from cuda_l2.system import process_tree
arena = Arena([Gemm(8, 4, 2)], slots=1, workspace_bytes=64)
terms = CpuContract("gemm", 2, "64")
worker = Worker(CandidateMemory(arena, terms), Path(ARTIFACT), terms)
"""
STOPPED = """
baselines = TorchBaselines(1)
baselines.attach(arena)
worker.freeze(), baselines.freeze()
assert process_tree.all_stopped(baselines._process.pid)
print(worker._process.pid, baselines._process.pid, flush=True)
"""
ENDLESS = """
worker.prepare([0])
worker._begin(b"12345678")
print(worker._process.pid, flush=True)
"""


@pytest.mark.parametrize(
    ("body", "begins", "count"),
    [("", STOPPED, 2), ('for (;;) __asm__ volatile("");', ENDLESS, 1)],
    ids=["stopped processes", "a candidate that never ends"],
)
def test_a_killed_parent_leaves_nothing_behind(tmp_path, body, begins, count) -> None:
    code = OF_A_PARENT.replace("ARTIFACT", repr(str(library(tmp_path, body)))) + begins + "signal.pause()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    groups = parent.stdout.readline().split()
    parent.kill()
    parent.wait()
    assert len(groups) == count
    for group in groups:
        require_gone(group)


def test_poison_is_a_nan() -> None:
    assert np.isnan(np.frombuffer(POISONS["float16"], np.float16))[0]


def test_the_pool_runs_every_task_once_whatever_the_count() -> None:
    pool = ctypes.CDLL(str(compiled(POOL, "-shared", "-fPIC", "-pthread")))
    assert pool.pool_start(3, 0) == 0
    task_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
    for count in (0, 1, 2, 3, 7, 100):
        for _ in range(20):
            seen: list[int] = []
            task = task_type(lambda context, index: seen.append(index))  # noqa: B023
            pool.pool_parallel_for(ctypes.c_int64(count), task, None)
            assert sorted(seen) == list(range(count))


def test_the_pool_keeps_rounds_apart_whatever_their_counts(tmp_path) -> None:
    """Rounds of rising counts, back to back in C, each with a context on the caller's stack that must not be touched
    after its round."""
    source = tmp_path / "rounds.c"
    source.write_text(
        f'#include "{POOL}"\n'
        + r"""
#include <stdio.h>
struct round { _Atomic int64_t runs; int64_t count; uint64_t live; };
static _Atomic int64_t stray;
static void task(void *context, int64_t index) {
    struct round *round = context;
    if (round->live != 0x600d600d || index >= round->count) atomic_fetch_add(&stray, 1);
    atomic_fetch_add(&round->runs, 1);
}
int main(void) {
    if (pool_start(3, 0)) return 2;
    int64_t wrong = 0;
    for (int64_t i = 0; i < 200000; ++i) {
        struct round round = {.count = 1 + i % 7, .live = 0x600d600d};
        pool_parallel_for(round.count, task, &round);
        wrong += round.runs != round.count;
        round.live = 0xdead;
    }
    printf("%ld %ld\n", (long)wrong, (long)stray);
    return 0;
}
"""
    )
    program = tmp_path / "rounds"
    subprocess.run([*paths.compiler_command(), "-O2", "-pthread", str(source), "-o", str(program)], check=True)
    assert subprocess.run([program], capture_output=True, text=True).stdout == "0 0\n"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core there is no other")
@pytest.mark.parametrize(("pinned", "on_the_callers"), [(0, "none"), (1, "one")])
def test_helpers_keep_off_the_core_of_their_caller_wherever_it_goes(tmp_path, pinned, on_the_callers) -> None:
    """Unless each thread has a core of its own, as in a candidate's process."""
    source = tmp_path / "cores.c"
    source.write_text(
        """
#define _GNU_SOURCE
#include <sched.h>
static int caller;
static int scripted(void) { return caller; }
#define sched_getcpu scripted
"""
        + f'#include "{POOL}"\n'
        + r"""
#include <stdio.h>
#include <stdlib.h>
static _Atomic int helper;
static void task(void *context, int64_t index) {
    if (syscall(SYS_gettid) != getpid()) helper = (int)syscall(SYS_gettid);
    while (!helper) RELAX(); /* so that the helper takes one of two tasks */
}
int main(int count, char **values) {
    cpu_set_t allowed, own;
    sched_getaffinity(0, sizeof allowed, &allowed);
    if (pool_start(2, atoi(values[1]))) return 2;
    for (caller = 0; caller < CPU_SETSIZE; ++caller) {
        if (!CPU_ISSET(caller, &allowed)) continue;
        pool_parallel_for(2, task, 0);
        sched_getaffinity(helper, sizeof own, &own);
        printf("%d %d\n", CPU_ISSET(caller, &own) != 0, CPU_COUNT(&own));
    }
    return 0;
}
"""
    )
    program, cores = tmp_path / "cores", len(os.sched_getaffinity(0))
    subprocess.run([*paths.compiler_command(), "-O2", "-pthread", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([program, str(pinned)], capture_output=True, text=True, check=True).stdout.splitlines()
    found = [tuple(map(int, line.split())) for line in printed]
    if on_the_callers == "none":
        assert found == [(0, cores - 1)] * cores
    else:
        assert sum(shared for shared, _ in found) == 1 and {count for _, count in found} == {1}


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the runner knows two architectures")
def test_an_arm_that_is_woken_leaves_the_core_to_the_thread_that_woke_it(tmp_path, arena) -> None:
    """Else the thread that reads the clock would wait for a core through every sample that is shorter than a slice."""
    artifact = library(tmp_path, "")
    with opened(arena, artifact, CpuContract("gemm", 2, "0")) as worker, TorchBaselines(1) as baselines:
        baselines.attach(arena)
        for pid in (worker._pid, baselines._process.pid):
            assert os.sched_getscheduler(pid) == os.SCHED_BATCH


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the runner knows two architectures")
def test_workers_leave_no_process_behind(tmp_path, arena) -> None:
    artifact = library(tmp_path, "")
    with opened(arena, artifact, CpuContract("gemm", 2, "0")) as worker:
        worker.launch(0, 60.0)
        group = worker._process.pid
    require_gone(group)


@pytest.mark.parametrize(
    ("held", "asked", "waits"),
    [("", "", True), ("0:1", "0:1", True), ("0:1", "0:2", False), ("", "0:1", True), ("0:1", "", True)],
)
def test_a_lock_holds_the_machine_or_one_gpu_of_it(held: str, asked: str, waits: bool, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_L2_CACHE", str(tmp_path))
    now_s, asking, entered = [0.0], threading.Event(), threading.Event()
    monkeypatch.setattr(lock, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))

    def flock(file, kind: int) -> None:
        if threading.current_thread() is thread:
            asking.set()
        fcntl.flock(file, kind)

    monkeypatch.setattr(lock, "fcntl", SimpleNamespace(**{**vars(fcntl), "flock": flock}))
    waited_s: list[float] = []

    def enter() -> None:
        with lock.machine_lock(asked) as seconds:
            waited_s.append(seconds)
            entered.set()

    thread = threading.Thread(target=enter)
    with lock.machine_lock(held):
        thread.start()
        asking.wait()
        now_s[0] = 50.0
        if waits:
            assert not entered.wait(0.3)
        else:
            entered.wait()
    thread.join()
    assert waited_s[0] == 50.0 or not waits


def test_only_the_librarys_own_pages_are_its_static_variables() -> None:
    """A thread's stack or a block of memory may lie right behind a library; what changes there is no state."""
    maps = """\
7f00000f0000-7f00000f8000 rw-p 00000000 00:00 0
7f0000100000-7f0000101000 r--p 00000000 fe:00 16 /cache/kernel.so
7f0000101000-7f0000102000 r-xp 00001000 fe:00 16 /cache/kernel.so
7f0000102000-7f0000103000 r--p 00002000 fe:00 16 /cache/kernel.so
7f0000103000-7f0000104000 rw-p 00003000 fe:00 16 /cache/kernel.so
7f0000104000-7f0000190000 rw-p 00000000 00:00 0
7f0000190000-7f0000191000 ---p 00000000 00:00 0
"""
    base = 0x7F0000100000
    assert writable(maps, "/cache/kernel.so", [(0x2000, 0x6000)]) == [
        (base + 0x3000, base + 0x4000),
        (base + 0x4000, base + 0x6000),  # without a file: what begins as zeros
    ]
    assert not writable(maps, "/cache/kernel.so", [])
