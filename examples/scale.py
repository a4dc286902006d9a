"""Many searches on one PostgreSQL archive, simulated: what the archive bears, what is done twice, what a death costs.

    python examples/scale.py                                    # starts a server of its own for the time
    python examples/scale.py --workers 400 --archive postgresql://me@host/trials
    python examples/scale.py --recorded ~/.local/share/cuda-l2/archive.db

A worker takes a candidate of its search, claims it, holds it as long as its judgement was recorded to take, and stores
a trial. Archive, claims and trials are the real ones; builds and timings are not made. Times come from an archive's
trials with --recorded, else they are drawn: log-normal, median 1 s. A tenth of the candidates is proposed by every
search. Half way a tenth of the workers dies with what it holds. Latencies include the wait for this machine's cores, on
which workers and a server of its own run too.
"""

import argparse
import collections
import contextlib
import math
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from postgres_server import PostgresServer, missing

from cuda_l2.archive import Archive
from cuda_l2.records import (
    Arm,
    Build,
    BuildStatus,
    Candidate,
    Gemm,
    Interval,
    Timing,
    TimingStatus,
    Trial,
    Verdict,
    VerdictStatus,
)
from cuda_l2.store.opening import open_database
from cuda_l2.system.place import place_of

GEMM = Gemm(4096, 4096, 4096)
MACHINE, PROTOCOL = "simulated", "search"
SOURCE = "// a line of a simulated kernel\n" * 120
COMMON = 10
"""Every so many candidates of a search are those of all searches."""
SPREAD = 0.6
"""Standard deviation of the logarithm of drawn times."""
RETRY_S = 1.0
"""How long a search leaves a candidate alone that another worker holds."""


@dataclass
class Settings:
    """What is simulated."""

    url: str
    workers: int
    searches: int
    seconds: float
    median_s: float
    lease_s: float
    dying: float  # share of the workers
    recorded_s: Sequence[float]


@dataclass
class Counts:
    """What the workers of a search met. Times in seconds."""

    calls: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    held: list[float] = field(default_factory=list)
    alive_s: float = 0.0  # of all workers, until the end of proposals
    busy_s: float = 0.0  # of it spent with a candidate that was judged
    known: int = 0
    left_to_others: int = 0
    acknowledged: int = 0
    recovered: list[float] = field(default_factory=list)  # from a worker's death to the trial of what it held
    lost: int = 0  # candidates of dead workers that nobody has judged
    tail_s: float = 0.0  # from the end of proposals to the last trial
    cpu_s: float = 0.0  # processor time of the search, without that of its start


class Search:
    """One search: its candidates, and threads as its workers."""

    def __init__(self, settings: Settings, number: int) -> None:
        self.settings, self.number, self.counts = settings, number, Counts()
        self._random = random.Random(number)
        self._proposed, self._again = 0, collections.deque[tuple[float, Candidate]]()
        """The latter: what others held or a dead worker left, and when it is asked for again."""
        self._died: dict[str, float] = {}
        self._lock = threading.Lock()

    def run(self, count: int, begin: Any) -> Counts:
        """Run workers until the time is up and what they hold is stored. begin: a barrier of all searches."""
        dying = round(count * self.settings.dying)
        threads = [threading.Thread(target=self._work, args=(i < dying, begin)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.counts.cpu_s += time.process_time()
        self.counts.tail_s = max(0.0, time.monotonic() - self._ends)
        self.counts.lost = len(self._died)
        return self.counts

    def _work(self, dies: bool, begin: Any) -> None:
        with Archive(self.settings.url) as archive:
            begin.wait()
            self._ends = time.monotonic() + self.settings.seconds
            half = self._ends - self.settings.seconds / 2
            with self._lock:
                self.counts.cpu_s = self.counts.cpu_s or -time.process_time()
                self.counts.alive_s += self.settings.seconds
            while time.monotonic() < self._ends:
                candidate = self._take()
                lease = {"lease_s": self.settings.lease_s}
                if not self._timed("claim", archive.claim, GEMM, candidate, MACHINE, PROTOCOL, **lease):
                    self._put_back(candidate)
                    continue
                if self._timed("find", archive.find, GEMM, candidate, MACHINE, PROTOCOL):
                    archive.release(GEMM, candidate, MACHINE, PROTOCOL)
                    self._settle(candidate, known=True)
                    continue
                if dies and time.monotonic() > half:  # its connection ends, its claim does not
                    self._died[candidate.id] = time.monotonic()
                    with self._lock:
                        self.counts.alive_s -= self._ends - time.monotonic()
                    self._put_back(candidate)
                    archive.holder = ""  # else its end would end the claim
                    return
                self._judge(archive, candidate)

    def _judge(self, archive: Archive, candidate: Candidate) -> None:
        """Hold a candidate for its time, renewing the claim at half of every lease, then store its trial."""
        held_s = left_s = self._duration()
        began = time.monotonic()
        while left_s > 0:
            pause = min(left_s, self.settings.lease_s / 2)
            time.sleep(pause)
            left_s -= pause
            if left_s > 0:
                archive.claim(GEMM, candidate, MACHINE, PROTOCOL, lease_s=self.settings.lease_s)
        self._timed("append", archive.append, result(candidate, held_s))
        with self._lock:
            self.counts.held.append(held_s)
            self.counts.busy_s += min(held_s, max(0.0, self._ends - began))
            self.counts.acknowledged += 1
        self._settle(candidate)

    def _take(self) -> Candidate:
        with self._lock:
            if self._again and self._again[0][0] <= time.monotonic():
                return self._again.popleft()[1]
            self._proposed += 1
            search = "all" if self._proposed % COMMON == 0 else str(self.number)
        return Candidate(f"{SOURCE}// {search} {self._proposed}\n")

    def _put_back(self, candidate: Candidate) -> None:
        with self._lock:
            self.counts.left_to_others += 1
            self._again.append((time.monotonic() + RETRY_S, candidate))

    def _settle(self, candidate: Candidate, *, known: bool = False) -> None:
        with self._lock:
            self.counts.known += known
            died = self._died.pop(candidate.id, None)
            if died is not None:
                self.counts.recovered.append(time.monotonic() - died)

    def _duration(self) -> float:
        if self.settings.recorded_s:
            return self._random.choice(self.settings.recorded_s)
        return self._random.lognormvariate(math.log(self.settings.median_s), SPREAD)

    def _timed(self, name: str, call: Any, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        done = call(*arguments, **named)
        self.counts.calls[name].append(time.perf_counter() - began)
        return done


def result(candidate: Candidate, seconds: float) -> Trial:
    """A trial of about the size that a search stores."""
    one = Interval(1.0, 0.98, 1.02)
    arms = tuple(Arm(name, one, 12, 120) for name in ("cuBLAS NN", "cuBLASLt-heuristic NN", "torch"))
    ours = Arm("candidate", one, 12, 120)
    ratios = tuple((arm.name, one) for arm in arms)
    timing = Timing(
        TimingStatus.MEASURED, PROTOCOL, candidate=ours, baselines=arms, reference="torch", speedup=one, speedups=ratios
    )
    build = Build(candidate.id, BuildStatus.BUILT, artifact="k", seconds=seconds)
    created = f"{time.time():.6f}"
    verdict = Verdict(VerdictStatus.CORRECT)
    return Trial(GEMM, candidate, MACHINE, PROTOCOL, build, verdict, timing, 1.0, created=created)


def recorded(archive: str) -> list[float]:
    """How long an archive's candidates took to build, check and time, in seconds."""
    with Archive(archive, reading=True) as opened:
        found = [
            trial.build.seconds
            + (trial.verdict.seconds if trial.verdict else 0.0)
            + (trial.timing.seconds if trial.timing else 0.0)
            for trial in opened.trials(protocol=PROTOCOL)
        ]
    return [seconds for seconds in found if seconds > 0]


def _search(settings: Settings, number: int, count: int, begin: Any, results: Any) -> None:
    results.put(Search(settings, number).run(count, begin))


def shares(workers: int, searches: int) -> list[int]:
    """Numbers of workers of the searches. Each has one at least: of fewer workers there are fewer searches."""
    each = [workers // min(searches, workers)] * min(searches, workers)
    each[0] += workers - sum(each)
    return each


def simulate(settings: Settings, on_begin: Callable[[], None] = lambda: None) -> list[Counts]:
    """Run all searches, each in a process of its own. on_begin: called when all workers are connected."""
    processes = multiprocessing.get_context("spawn")
    begin, results = processes.Barrier(settings.workers + 1), processes.Queue()
    running = [
        processes.Process(target=_search, args=(settings, number, count, begin, results))
        for number, count in enumerate(shares(settings.workers, settings.searches))
    ]
    for process in running:
        process.start()
    begin.wait()
    on_begin()
    found = [results.get() for _ in running]
    for process in running:
        process.join()
    return found


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else math.nan


def rows(
    settings: Settings, found: list[Counts], stored: int, distinct: int, server_s: float = math.nan
) -> Iterator[tuple[str, str]]:
    """The table's lines. server_s: processor time of the server, without that of the start."""
    held = [seconds for counts in found for seconds in counts.held]
    busy_s = sum(counts.busy_s for counts in found)
    acknowledged = sum(counts.acknowledged for counts in found)
    alive_s = sum(counts.alive_s for counts in found)
    yield "workers, searches", f"{settings.workers}, {len(found)}"
    yield "candidates a second", f"{acknowledged / settings.seconds:.1f}"
    yield "workers busy", f"{100 * busy_s / alive_s:.1f} %"
    cpu_ms = [1e3 * each / max(1, acknowledged) for each in (sum(counts.cpu_s for counts in found), server_s)]
    yield "processor time a candidate", f"{cpu_ms[0]:.2f} ms workers, {cpu_ms[1]:.2f} ms server"
    for name in ("find", "claim", "append"):
        calls = [1e3 * seconds for counts in found for seconds in counts.calls[name]]
        yield f"{name}, p50 and p99", f"{percentile(calls, 0.5):.1f} ms, {percentile(calls, 0.99):.1f} ms"
    yield "work done twice", f"{100 * (stored - distinct) / max(1, stored):.2f} % ({stored - distinct} of {stored})"
    yield "met as known", str(sum(counts.known for counts in found))
    yield "left to another worker", str(sum(counts.left_to_others for counts in found))
    yield "held, median and longest", f"{statistics.median(held):.2f} s, {max(held):.2f} s"
    yield "after the last proposal", f"{max(counts.tail_s for counts in found):.2f} s until the last trial"
    recovered = [seconds for counts in found for seconds in counts.recovered]
    lost = sum(counts.lost for counts in found)
    most = f"{statistics.median(recovered):.1f} s, {max(recovered):.1f} s" if recovered else "none"
    yield "dead workers' candidates", f"{len(recovered)} judged by others, {lost} not yet"
    yield "from death to trial, median and longest", f"{most} (the lease is {settings.lease_s:g} s)"
    yield "acknowledged and not stored", str(acknowledged - stored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", default="", help="postgresql://USER@HOST/DATABASE; without it a server is started")
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--searches", type=int, default=4, help="processes among which workers are shared out")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long candidates are proposed")
    parser.add_argument("--median", type=float, default=1.0, help="median of drawn times in seconds")
    parser.add_argument("--lease", type=float, default=4.0, help="seconds a claim holds unless it is renewed")
    parser.add_argument("--dying", type=float, default=0.1, help="share of the workers that die half way")
    parser.add_argument("--recorded", default="", help="an archive whose trials' times are replayed")
    given = parser.parse_args()
    if given.workers < 1 or given.searches < 1:
        parser.error("there must be at least 1 worker and 1 search")
    times = recorded(given.recorded) if given.recorded else []
    with contextlib.ExitStack() as stack:
        server, server_s = None, [math.nan, math.nan]
        if not given.archive:
            if missing():
                parser.error(missing())
            server = stack.enter_context(PostgresServer(connections=given.workers + 20))
            given.archive = server.url()

        def clock(end: int) -> None:
            if server:
                server_s[end] = server.cpu_s()

        settings = Settings(
            *(given.archive, given.workers, given.searches, given.seconds, given.median, given.lease, given.dying),
            recorded_s=times,
        )
        found = simulate(settings, lambda: clock(0))
        clock(1)
        with open_database(place_of(given.archive), "read") as db:
            stored, distinct = db.read("trial count")[0][0], db.read("candidate count")[0][0]
    print(f"times: {f'{len(times)} of {given.recorded}' if times else f'drawn, median {given.median:g} s'}")
    for name, value in rows(settings, found, stored, distinct, server_s[1] - server_s[0]):
        print(f"{name:40} {value}")


if __name__ == "__main__":
    main()
