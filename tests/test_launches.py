"""Launches are counted by who calls, from outside, in processes that work on as before."""

import contextlib
import platform
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuda_l2 import process_tree
from cuda_l2.audit.launches import Launches
from cuda_l2.audit.onlooker import MOST_HIDDEN, hidden_launches
from cuda_l2.audit.process import Launched, Watched
from cuda_l2.audit.tracing import threads

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
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
int torch_runtime(int), torch_driver(int), torch_graph(int), own_runtime(int), own_driver(int);
extern char **environ;
static volatile int signals, wrong;
static char *self;
static void noted(int n) { signals++; }
static void *launching(void *count) {
    for (long i = 0; i < (long)count; i++) wrong += torch_runtime(i) != i + 1;
    return 0;
}
static void *waiting(void *_) { for (;;) pause(); }
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
}
int main(int count, char **arguments) {
    self = arguments[0];
    signal(SIGUSR1, noted);
    if (count > 1) { work('r'); return wrong; }
    pthread_t idle;
    for (int i = 0; i < 4; i++) pthread_create(&idle, 0, waiting, 0);
    setvbuf(stdout, 0, _IONBF, 0);
    for (int order; (order = getchar()) != EOF;)
        if (order != '\n') { work(order); printf("%c %d %d\n", order, signals, wrong); }
    return wrong;
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
    build("program", PROGRAM, "libtorch_cuda.so", "own.so")
    return folder / "program"


class Running:
    """The program; `order` makes it work, and says that signals came and results were right."""

    def __init__(self, program: Path) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([program], stdin=pipe, stdout=pipe, bufsize=0)
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
