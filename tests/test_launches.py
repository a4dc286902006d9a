"""Launches are counted by who calls, from outside, in processes that work on as before."""

import contextlib
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cuda_l2.kernelbench.launches import Launches
from cuda_l2.kernelbench.onlooker import MOST_HIDDEN, hidden_launches
from cuda_l2.kernelbench.process import Launched, Watched
from cuda_l2.kernelbench.samples import Sampler
from cuda_l2.kernelbench.symbols import exported
from cuda_l2.kernelbench.tracing import threads, tracer
from cuda_l2.system import process_tree

DRIVER = "int cuLaunchKernel(int x) { return x + 1; } int cuGraphLaunch(int x) { return x + 1; }"
RUNTIME = """
int cuLaunchKernel(int); int cuGraphLaunch(int);
int cudaLaunchKernel(int x) { volatile int kept = cuLaunchKernel(x); return kept; }
int cudaGraphLaunch(int x) { volatile int kept = cuGraphLaunch(x); return kept; }
"""
CALLER = """
int cudaLaunchKernel(int); int cuLaunchKernel(int); int cudaGraphLaunch(int);
int NAME_runtime(int x) { volatile int kept = cudaLaunchKernel(x); return kept; }
int NAME_driver(int x) { volatile int kept = cuLaunchKernel(x); return kept; }
int NAME_graph(int x) { volatile int kept = cudaGraphLaunch(x); return kept; }
"""
PROGRAM = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
int cudaLaunchKernel(int), torch_runtime(int), torch_driver(int), torch_graph(int), own_runtime(int), own_driver(int);
extern char **environ;
static volatile int signals, wrong;
static char *self;
static void noted(int n) { signals++; }
static void *launching(void *count) {
    for (long i = 0; i < (long)count; i++) wrong += torch_runtime(i) != i + 1;
    return 0;
}
static void *taking(void *most) {
    for (int i = 0; signals < (long)most && i < 20000; i++) wrong += torch_runtime(i) != i + 1;
    return 0;
}
static void *waiting(void *_) { for (;;) pause(); }
static void *vforking(void *_) {
    if (!vfork()) { usleep(1500000); _exit(0); }
    return 0;
}
static void threads(int n, long count) {
    pthread_t made[64];
    for (int i = 0; i < n; i++) pthread_create(&made[i], 0, launching, (void *)count);
    for (int i = 0; i < n; i++) pthread_join(made[i], 0);
}
static void ended(pid_t pid) {
    int status;
    wrong += waitpid(pid, &status, 0) != pid || status != 0;
}
static void work(char order) {
    if (order == 'r') for (int i = 0; i < 5; i++) wrong += torch_runtime(i) != i + 1;
    if (order == 'd') for (int i = 0; i < 3; i++) wrong += torch_driver(i) != i + 1;
    if (order == 'g') for (int i = 0; i < 2; i++) wrong += torch_graph(i) != i + 1;
    if (order == 'o') for (int i = 0; i < 7; i++) wrong += own_runtime(i) + own_driver(i) != 2 * i + 2;
    if (order == 't') threads(6, 40);
    if (order == 'f') {
        pid_t pid = fork();
        if (!pid) { threads(3, 10); _exit(wrong); }
        threads(2, 10);
        ended(pid);
    }
    if (order == 'v') {
        pid_t pid = vfork();
        if (!pid) { execl(self, self, "child", NULL); _exit(9); }
        ended(pid);
    }
    if (order == 's') {
        pid_t pid;
        char *arguments[] = {self, "child", NULL};
        wrong += posix_spawn(&pid, self, 0, 0, arguments, environ) != 0;
        ended(pid);
    }
    if (order == 'k') for (int i = 0; i < 4; i++) { raise(SIGUSR1); wrong += torch_runtime(i) != i + 1; }
    pthread_t thread;
    if (order == 'l') for (int i = 0; i < 8; i++) pthread_create(&thread, 0, launching, (void *)INT64_MAX);
    if (order == 'q') {
        pthread_create(&thread, 0, taking, (void *)600);
        for (int i = 0; i < 600; i++) {
            wrong += pthread_sigqueue(thread, SIGRTMIN, (union sigval){i}) != 0;
            if (i % 4 == 3) usleep(2000);
        }
        pthread_join(thread, 0);
    }
    if (order == 'p') { pthread_create(&thread, 0, vforking, 0); usleep(200000); }
    if (order == 'b') {
        sigset_t trap;
        sigemptyset(&trap);
        sigaddset(&trap, SIGTRAP);
        pthread_sigmask(SIG_BLOCK, &trap, 0);
        syscall(SYS_tgkill, getpid(), getpid(), SIGTRAP);
    }
    if (order == 'm') {
        uintptr_t page = (uintptr_t)cudaLaunchKernel & -sysconf(_SC_PAGESIZE);
        wrong += madvise((void *)page, sysconf(_SC_PAGESIZE), MADV_DONTNEED) != 0;
    }
}
static void *obeying(void *_) {
    for (int order; (order = getchar()) != EOF;)
        if (order != '\n') { work(order); printf("%c %d %d\n", order, signals, wrong); }
    exit(wrong);
}
int main(int count, char **arguments) {
    self = arguments[0];
    signal(SIGUSR1, noted);
    signal(SIGRTMIN, noted);
    if (count > 1 && !strcmp(arguments[1], "child")) { work('r'); return wrong; }
    pthread_t idle;
    for (int i = 0; i < 4; i++) pthread_create(&idle, 0, waiting, 0);
    setvbuf(stdout, 0, _IONBF, 0);
    if (count > 1) { pthread_create(&idle, 0, obeying, 0); syscall(SYS_exit, 0); }
    obeying(0);
}
"""

RPATH = "-Wl,--disable-new-dtags,-rpath,$ORIGIN"  # before LD_LIBRARY_PATH, which may know CUDA's own libraries

pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="another processor"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module", params=["branch", "none"])
def program(request, tmp_path_factory) -> Path:
    """Built with first instructions that do nothing, where branches are checked, and without."""
    folder = tmp_path_factory.mktemp(request.param)
    protection = f"-fcf-protection={request.param}"
    if platform.machine() == "aarch64":
        protection = "-mbranch-protection=" + {"branch": "bti"}.get(request.param, request.param)
    flags = ["gcc", "-O1", protection, "-fno-plt", RPATH, f"-L{folder}", "-pthread"]

    def build(name: str, text: str, *libraries: str) -> None:
        source = folder / f"{name}.c"
        source.write_text(text)
        kind = ["-shared", "-fPIC"] if ".so" in name else []
        linked = [f"-l:{library}" for library in libraries]
        subprocess.run([*flags, *kind, "-o", str(folder / name), str(source), *linked], check=True)

    build("libcuda.so.1", DRIVER)
    build("libcudart.so.13", RUNTIME, "libcuda.so.1")
    build("libtorch_cuda.so", CALLER.replace("NAME", "torch"), "libcudart.so.13", "libcuda.so.1")
    build("own.so", CALLER.replace("NAME", "own"), "libcudart.so.13", "libcuda.so.1")
    build("program", PROGRAM, "libtorch_cuda.so", "own.so", "libcudart.so.13")
    return folder / "program"


class Running:
    """The program; `order` makes it work, and says that signals came and results were right."""

    def __init__(self, program: Path, *arguments: str) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([program, *arguments], stdin=pipe, stdout=pipe, bufsize=0)
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        assert self.stdin and self.stdout
        self.order("o")

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, order: str) -> None:
        self.stdin.write(order.encode())

    def has_told(self) -> bool:
        return bool(select.select([self.stdout], [], [], 0)[0])

    def told(self) -> tuple[str, int, int]:
        order, signals, wrong = self.stdout.readline().split()
        return order.decode(), int(signals), int(wrong)

    def order(self, order: str) -> int:
        """Signals so far."""
        self.send(order)
        told = self.told()
        assert (told[0], told[2]) == (order, 0)
        return told[1]


@pytest.fixture
def running(program) -> Iterator[Running]:
    started = Running(program)
    try:
        yield started
        started.stdin.close()
        assert started.process.wait(60) == 0, "it works on to its end"
    finally:
        started.process.kill()
        started.process.wait()


def counted(running: Running, order: str) -> tuple[dict[tuple[str, str], int], Launches, int]:
    """Launches of one order by the caller's file name and by entry; signals so far."""
    with Launches(running.pid) as launches:
        if not launches.able:
            pytest.skip("no threads can be traced here")
        running.send(order)
        launches.until(running.has_told, 60)
    told = running.told()
    assert (told[0], told[2]) == (order, 0)
    return {(Path(path).name, entry): n for (path, entry), n in launches.counts.items()}, launches, told[1]


TORCH = ("libtorch_cuda.so", "cudaLaunchKernel")


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("r", {TORCH: 5}),
        ("d", {("libtorch_cuda.so", "cuLaunchKernel"): 3}),
        ("g", {("libtorch_cuda.so", "cudaGraphLaunch"): 2}),
        ("o", {("own.so", "cudaLaunchKernel"): 7, ("own.so", "cuLaunchKernel"): 7}),
        ("t", {TORCH: 240}),
        ("f", {TORCH: 50}),
    ],
)
def test_launches_are_counted_by_caller_in_all_threads_and_children(running, order, expected) -> None:
    found, launches, _ = counted(running, order)
    assert found == expected
    within = {(Path(path).name, entry): n for (path, entry), n in launches.within.items()}
    through = sum(n for (_, entry), n in expected.items() if entry.startswith("cuda"))
    assert sum(within.values()) == through, "what the runtime asks of the driver is not counted twice"
    assert {path for path, _ in within} <= {"libcudart.so.13"}


@pytest.mark.parametrize("order", ["v", "s"])
def test_a_child_that_becomes_another_program_runs_as_it_should(running, order) -> None:
    found, _, _ = counted(running, order)
    assert found == {}, "its libraries were not there when they were looked for"
    assert counted(running, "r")[0] == {TORCH: 5}


def test_signals_reach_the_process(running) -> None:
    found, _, signals = counted(running, "k")
    assert found == {TORCH: 4} and signals == 4


def test_nothing_is_left_of_it(running) -> None:
    """No thread is traced, no byte of the code is another, and it launches as before."""
    before = memory_of_code(running.pid)
    for _ in range(3):
        assert counted(running, "t")[0] == {TORCH: 240}
    assert memory_of_code(running.pid) == before
    for tid in threads(running.pid):
        assert "TracerPid:\t0" in Path(f"/proc/{running.pid}/task/{tid}/status").read_text()
    for order in "rdgotfvs":
        running.order(order)


def memory_of_code(pid: int) -> list[bytes]:
    """Of the libraries that stand in for CUDA's."""
    found = []
    with Path(f"/proc/{pid}/mem").open("rb") as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_, path = line.split(maxsplit=5)
            if "x" in rights and "/libcuda" in path:
                low, high = (int(part, 16) for part in span.split("-"))
                memory.seek(low)
                found.append(memory.read(high - low))
    assert len(found) == 2
    return found


def test_breakpoints_are_there_while_it_counts_and_go_when_something_fails(running) -> None:
    before = memory_of_code(running.pid)
    with contextlib.suppress(ZeroDivisionError), Launches(running.pid) as launches:
        if not launches.able:
            pytest.skip("no threads can be traced here")
        assert memory_of_code(running.pid) != before
        running.send("t")
        launches.until(lambda: sum(launches.counts.values()) > 20, 60)
        raise ZeroDivisionError
    assert running.told() == ("t", 0, 0)
    assert memory_of_code(running.pid) == before


def test_a_process_that_is_stopped_stays_so_and_goes_on_when_told(running) -> None:
    with Launches(running.pid) as launches:
        if not launches.able:
            pytest.skip("no threads can be traced here")
        running.send("t")
        launches.until(lambda: sum(launches.counts.values()) > 20, 60)
        stopped = process_tree.stop(running.pid)
        launches.until(lambda: False, 0.2)
        before = sum(launches.counts.values())
        launches.until(lambda: False, 0.2)
        assert sum(launches.counts.values()) == before < 240
        process_tree.resume(stopped)
        launches.until(running.has_told, 60)
        assert sum(launches.counts.values()) == 240
        process_tree.stop(running.pid)
        launches.until(lambda: False, 0.1)
    assert running.told() == ("t", 0, 0)
    running.send("r")
    time.sleep(0.2)
    states = {Path(f"/proc/{running.pid}/task/{tid}/stat").read_text().split()[2] for tid in threads(running.pid)}
    assert states == {"T"}, "stopped, and by nobody who traces it"
    process_tree.resume([running.pid])
    assert running.told() == ("r", 0, 0)


def test_a_process_that_ends_meanwhile_ends_the_counting(program) -> None:
    started = Running(program)
    with started.process, Launches(started.pid) as launches:
        started.process.send_signal(signal.SIGKILL)
        launches.until(lambda: not launches.able or started.process.poll() is not None, 60)
    assert started.process.returncode == -signal.SIGKILL


def test_signals_that_come_at_a_breakpoint_are_not_lost(running) -> None:
    found, _, signals = counted(running, "q")
    assert set(found) == {TORCH} and signals == 600


@pytest.mark.timeout(60)
def test_threads_that_launch_without_end_are_counted_no_longer_than_was_said(running) -> None:
    with Launches(running.pid) as launches:
        if not launches.able:
            pytest.skip("no threads can be traced here")
        running.send("l")
        start = time.perf_counter()
        launches.until(lambda: False, 1.0)
        assert time.perf_counter() - start < 5
        assert launches.counts.total() > 8
    assert running.told() == ("l", 0, 0)
    running.order("r")


def test_who_is_interrupted_leaves_nobody_stopped(running, monkeypatch) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    before, start = memory_of_code(running.pid), time.perf_counter()
    with contextlib.suppress(KeyboardInterrupt), Launches(running.pid) as launches:
        if not launches.able:
            pytest.skip("no threads can be traced here")
        running.send("t")
        monkeypatch.setattr(launches, "_caller", interrupted)
        launches.until(running.has_told, 60)
    assert running.told() == ("t", 0, 0) and time.perf_counter() - start < 5
    assert memory_of_code(running.pid) == before


def test_a_child_that_shares_its_parents_memory_changes_nothing(running) -> None:
    before = memory_of_code(running.pid)
    running.order("p")
    assert counted(running, "r")[0] == {TORCH: 5}
    assert memory_of_code(running.pid) == before
    running.order("r")


@pytest.mark.timeout(60)
def test_a_thread_with_a_signal_that_it_never_takes_is_let_go(running) -> None:
    running.order("b")
    assert counted(running, "t")[0] == {TORCH: 240}
    assert {tracer(tid) for tid in threads(running.pid)} == {0}


def test_a_process_whose_first_thread_ended_is_counted_and_sampled(running, program) -> None:
    counted(running, "r")  # where threads can be traced
    started = Running(program, "headless")
    with started.process:
        with Launches(started.pid) as launches:
            assert launches.able
        assert counted(started, "r")[0] == {TORCH: 5}
        started.order("l")
        assert any("libtorch_cuda" in path for path, _ in sampled(started, lambda: False, 0.5).counts)
        started.process.kill()


def test_who_keeps_threads_from_being_traced_or_takes_breakpoints_away_is_known(running) -> None:
    with Launches(running.pid) as launches:
        if not launches.able:
            pytest.skip("no threads can be traced here")
        assert not launches.untraced and not launches.removed
        running.send("m")
        launches.until(running.has_told, 60)
        launches.look()
        assert launches.removed == {running.pid}
    assert running.told() == ("m", 0, 0)
    thread = threads(running.pid)[-1]
    code = f"from cuda_l2.kernelbench.tracing import seize; print(seize({thread}), flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as other:
        assert other.stdout and other.stdin and other.stdout.readline() == b"True\n"
        with Launches(running.pid) as launches:
            assert not launches.able
        with Sampler(running.pid) as sampler:
            pass
        assert launches.untraced == sampler.untraced == {running.pid}
        other.stdin.write(b"\n")


def sampled(running: Running, done: Callable[[], bool], seconds: float) -> Sampler:
    with Sampler(running.pid) as sampler:
        if not sampler.able:
            pytest.skip("no threads can be traced here")
        sampler.until(done, seconds)
    return sampler


@pytest.mark.timeout(60)
def test_sampling_ends_in_time(running) -> None:
    start = time.perf_counter()
    sampled(running, lambda: False, 0.3)
    running.order("p")
    sampled(running, lambda: False, 0.1)
    assert time.perf_counter() - start < 5, "no wait for a thread that the kernel has until its child is gone"
    time.sleep(1.5)
    sampled(running, lambda: False, 0.1)
    assert {tracer(tid) for tid in threads(running.pid)} == {0}, "let go on, late"


@pytest.mark.timeout(60)
def test_signals_and_ends_of_children_go_on_while_it_is_sampled(running) -> None:
    with Sampler(running.pid) as sampler:
        if not sampler.able:
            pytest.skip("no threads can be traced here")
        for order in "kfks":
            running.send(order)
            sampler.until(running.has_told, 20)
            assert running.has_told() and running.told()[2] == 0
    assert running.order("r") == 8


def test_a_library_of_another_processor_has_no_entry_points(tmp_path) -> None:
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER + "int cuInit(int x) { return x; }")
    command = ["gcc", "-m32", "-nostdlib", "-shared", "-fPIC", "-o", library, source]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no compiler for 32 bits")
    assert exported(library, ["cuLaunchKernel"]) == {}


@pytest.mark.parametrize(
    ("counts", "launches", "graphs", "hidden"),
    [
        ({("/x/libtorch_cuda.so", "cudaLaunchKernel"): 40}, 4.0, 0.0, 0.0),
        ({("/x/libtorch_cuda.so", "cudaLaunchKernel"): 40}, 1.0, 0.0, 3.0),
        ({("/x/libcublasLt.so.13", "cuLaunchKernelEx"): 10, ("/x/own.so", "cudaLaunchKernel"): 90}, 0.0, 0.0, 1.0),
        ({("/x/own.so", "cudaLaunchKernel"): 90, ("", "cuLaunchKernel"): 10}, 0.0, 0.0, 0.0),
        ({("/x/own.so", "cuGraphLaunch"): 10}, 9.0, 0.0, 1.0),
        ({("/x/libtorch_cuda.so", "cudaGraphLaunch_ptsz"): 10}, 0.0, 1.0, 0.0),
    ],
)
def test_what_the_profiler_did_not_see_of_pytorchs_launches_is_hidden(counts, launches, graphs, hidden) -> None:
    launched = Launched(counts, {}, calls=10)
    found = hidden_launches(launched, Watched(1.0, {}, {}, launches, graphs))
    assert found == hidden and (found > MOST_HIDDEN) == bool(hidden)
