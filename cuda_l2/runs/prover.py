"""Verifies many kernels in full on one GPU, several at once: nothing is timed, so nobody is disturbed.

    builds, those with delays too --> worker processes, a rig each --> the sanitizer, several candidates a process

A worker that dies costs its item only, which is tried once more with nothing beside it.
"""

import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from cuda_l2.build.build_server import BuildServers
from cuda_l2.build.stress import stressed
from cuda_l2.library.kernels import ProofTask
from cuda_l2.library.proof import Proof, proof_of
from cuda_l2.machine._base import Fault
from cuda_l2.machine.cuda import sanitizer
from cuda_l2.machine.cuda.alone import Job
from cuda_l2.machine.cuda.sanitizer import Tool
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Build, BuildStatus, Candidate, Verdict, VerdictStatus, from_json, to_json
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.line_process import LineProcess
from cuda_l2.system.values import now
from cuda_l2.verify import races
from cuda_l2.verify._base import CheckFailed
from cuda_l2.verify._cuda import SANITIZER_TIMEOUT_S
from cuda_l2.verify.stress import SEEDS

MAIN = "cuda_l2.runs.prover_worker"
CORES_A_WORKER = 3
AHEAD = 24
"""Items whose builds are under way before the first of them is needed."""
TOGETHER = 8
"""Candidates that one process under a tool of the sanitizer launches."""
ANSWER_S = 300.0
"""A worker that is silent for longer on one item is stuck."""
WATCH_S = 2 * SANITIZER_TIMEOUT_S
"""For several candidates together, or one beside others."""


@dataclass
class _Item:
    """A task on its way."""

    task: ProofTask
    build: Build | None = None
    verdict: Verdict | None = None
    watching: int = 0  # tools that have yet to look
    tries: int = 0
    trouble: str = ""  # why there is no verdict


@dataclass
class _Answer:
    """An item that did not build, or that a worker has answered for."""

    item: _Item
    jobs: list[tuple[Tool, Job]] = field(default_factory=list)


@dataclass
class _Watched:
    """What a tool found in an item; None where nothing."""

    item: _Item
    failure: CheckFailed | Fault | None


Event = _Answer | _Watched | Exception
"""An item verified, one that a tool has looked at, or what went wrong in a thread."""


class Prover(Closing):
    """The processes of a run on the GPU of this machine. A context manager."""

    def __init__(self, target: CudaTarget, jobs: int) -> None:
        self._target, self._patience = target, float(2 + jobs)
        self._builders = BuildServers(target)
        self._threads = max(1, target.cores // jobs)
        self._events: queue.Queue[Event] = queue.Queue()
        self._items: Iterator[_Item] = iter(())
        self._started: deque[tuple[_Item, Iterator[Build]]] = deque()
        self._workers: list[_Worker] = []
        self._closed, self._lock = False, threading.Lock()
        self._watchers = ThreadPoolExecutor(max(1, jobs // 2))
        self._jobs = jobs

    def run(self, tasks: Sequence[ProofTask], on_proof: Callable[[Proof], None]) -> None:
        """Prove every task; `on_proof` is called here, in the order in which they end."""
        self._items = map(_Item, tasks)
        for _ in range(min(self._jobs, len(tasks))):
            threading.Thread(target=self._verify, daemon=True).start()
        worker: _Worker | None = None
        for item in list(self._settle(len(tasks), on_proof)):
            worker = self._alive(worker)
            self._events.put(worker.verify(item))
            for _ in self._settle(1, on_proof):
                raise AssertionError("an item is tried twice at most")

    def close(self) -> None:
        """Also in the middle: what runs is ended, and what the sanitizer has begun is waited for."""
        self._closed = True
        self._builders.close()
        for worker in list(self._workers):
            worker.close()
        self._watchers.shutdown(cancel_futures=True)

    def _settle(self, count: int, on_proof: Callable[[Proof], None]) -> Iterator[_Item]:
        """Take so many items to their end; those whose worker died for the first time are given back instead."""
        unverified, waiting = count, {tool: list[tuple[_Item, Job]]() for tool in Tool}
        while count:
            event = self._events.get()
            match event:
                case Exception():
                    raise event
                case _Answer():
                    unverified, item = unverified - 1, event.item
                    item.watching = len(event.jobs)
                    for tool, job in event.jobs:
                        waiting[tool].append((item, job))
                case _Watched():
                    item = event.item
                    item.watching -= 1
                    _add(item, event.failure)
            for tool, entries in waiting.items():
                while entries and (len(entries) >= TOGETHER or not unverified):
                    self._watchers.submit(self._watch, tool, entries[:TOGETHER])
                    del entries[:TOGETHER]
            if item.watching:
                continue
            count -= 1
            if item.trouble and item.tries < 2:
                yield item
            else:
                outcome = item.verdict or item.trouble or (item.build.reason if item.build else "")
                on_proof(proof_of(item.task, self._target.machine, now(), item.build, outcome))

    def _next(self) -> tuple[_Item, Iterator[Build]] | None:
        """An item and builds under way: its candidate's, and those with delays, which a worker then finds cached."""
        with self._lock:
            while len(self._started) <= AHEAD and (item := next(self._items, None)):
                source = item.task.candidate.source
                texts = [source, *(stressed(source, seed) for seed in SEEDS)]
                self._started.append((item, self._builders.build([Candidate(text) for text in texts])))
            return self._started.popleft() if self._started else None

    def _verify(self) -> None:
        """One worker's work, until there is no more."""
        worker: _Worker | None = None
        try:
            while not self._closed and (started := self._next()):
                item, builds = started
                item.build, *_ = builds
                if item.build.status is not BuildStatus.BUILT:
                    self._events.put(_Answer(item))
                    continue
                worker = self._alive(worker)
                self._events.put(worker.verify(item))
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the run, and not this thread alone
            if not self._closed:
                self._events.put(error)

    def _alive(self, worker: "_Worker | None") -> "_Worker":
        """The worker, or another in its place where it has ended."""
        if worker is None or not worker.alive:
            worker = _Worker(self._patience, self._threads)
            self._workers.append(worker)
        return worker

    def _watch(self, tool: Tool, entries: Sequence[tuple[_Item, Job]]) -> None:
        """Let a tool of the sanitizer look at candidates together, and where it says something at each alone."""
        try:
            together = len(entries) > 1 and sanitizer.silent(tool, [job for _, job in entries], WATCH_S)
            for item, job in entries:
                self._events.put(_Watched(item, None if together else _finding(tool, job, item.task)))
        except Exception as error:  # noqa: BLE001 - the run ends with it
            self._events.put(error)


class _Worker:
    """One verifying process."""

    def __init__(self, patience: float, threads: int) -> None:
        self._process = LineProcess(MAIN, str(patience), variables={"OMP_NUM_THREADS": str(threads)})
        self.alive = True

    def verify(self, item: _Item) -> _Answer:
        """Ask for a verdict; the item says where there is none, and the process is gone then."""
        assert item.build
        item.tries += 1
        candidate, task = item.task.candidate, item.task
        message = {"gemm": str(task.gemm), "source": candidate.source, "build": to_json(item.build)}
        answer = self._process.ask(message | {"seed": secrets.randbits(48)}, ANSWER_S)
        if "verdict" in answer:
            item.verdict, item.trouble = from_json(Verdict, answer["verdict"]), ""
            return _Answer(item, [(Tool(tool), from_json(Job, job)) for tool, job in answer["jobs"]])
        status = self.close()
        item.trouble = answer.get("error") or f"the verifying process ended with status {status}"
        return _Answer(item)

    def close(self) -> int:
        """Its exit status; what it started ends with it."""
        self.alive = False
        return self._process.close()


def _finding(tool: Tool, job: Job, task: ProofTask) -> CheckFailed | Fault | None:
    try:
        finding = sanitizer.findings(tool, job, WATCH_S)
    except Fault as fault:
        return fault
    return races.failed(tool, job.task, task.gemm, finding) if finding else None


def _add(item: _Item, failure: CheckFailed | Fault | None) -> None:
    """Put what a tool found into the verdict, which did not know yet."""
    verdict = item.verdict
    if failure is None or verdict is None or verdict.status is not VerdictStatus.CORRECT:
        return
    name = races.CHECK.name
    passed = tuple(check for check in verdict.passed if check != name)
    reason = str(failure) if isinstance(failure, Fault) else failure.reason
    item.verdict = replace(verdict, status=failure.status, check=name, reason=reason, passed=passed)


def require_sanitizer() -> None:
    """UserError where compute-sanitizer is missing, or cannot watch this GPU: then nothing can be proved."""
    if not sanitizer.works():
        raise UserError("compute-sanitizer cannot watch this GPU, and without it no kernel can be proved here")
