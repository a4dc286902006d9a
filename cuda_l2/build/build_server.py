"""Builds CUDA candidates in processes of their own, so that reading texts and machine code takes no time from timings.

Run as a module it is such a process: one JSON line in, with sources, answered by one line of builds. The process that
starts them shares nothing with them but that pipe: Python's threads would share its interpreter.
"""

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Build, Candidate, from_json
from cuda_l2.system.errors import UserError
from cuda_l2.system.line_process import LineProcess

CORES_A_SERVER = 2
AT_ONCE = 4
"""Candidates that a server compiles at once: more than its cores, which wait as another server reads machine code."""
MOST_A_BATCH = 8
"""Candidates sent at once: reading machine code takes longer to start than one of them takes to compile."""
FIRST_BATCH = 2
"""And at first; each next batch of a server is up to twice as large."""
MOST_KEPT = 1000
"""Sources whose builds are remembered."""
NICENESS = 19
"""Judging goes first where cores are short: there is one GPU, and builds are ahead of it."""


class BuildServers:
    """As many processes as the host's cores can feed. A context manager; they start on first use."""

    def __init__(self, target: CudaTarget) -> None:
        self._target = replace(target, cores=min(AT_ONCE, target.cores))
        self._count = max(1, target.cores // CORES_A_SERVER)
        self._pool = ThreadPoolExecutor(self._count)
        self._local, self._lock = threading.local(), threading.Lock()
        self._processes: list[LineProcess] = []
        self._begun: dict[str, Future[dict[str, Build]]] = {}
        """By source: the batch that it is built in, the oldest first."""

    def build(self, candidates: Sequence[Candidate]) -> Iterator[Build]:
        """Builds in order; those not asked for yet go on in the background."""
        return (awaited() for awaited in self.begin(candidates))

    def begin(self, candidates: Sequence[Candidate]) -> list[Callable[[], Build]]:
        """Have candidates built in the background. For each a function that waits for its build.

        What was built does not go to the servers again, where it would wait for all that is built ahead.
        """
        sources = [candidate.source for candidate in candidates]
        with self._lock:
            for source in self._begun.keys() & sources:
                if _gone(self._begun[source], source):
                    del self._begun[source]
            new = [source for source in dict.fromkeys(sources) if source not in self._begun]
            for batch in filter(None, _batches(new, self._count)):
                self._begun |= dict.fromkeys(batch, self._pool.submit(self._send, batch))
            awaited: list[Callable[[], Build]] = [partial(_awaited, self._begun[source], source) for source in sources]
            for source in list(self._begun)[:-MOST_KEPT]:
                if self._begun[source].done():
                    del self._begun[source]
            return awaited

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()

    def _send(self, sources: Sequence[str]) -> dict[str, Build]:
        if not hasattr(self._local, "process"):
            self._local.process = LineProcess("cuda_l2.build.build_server")
            self._processes.append(self._local.process)
        answer = self._local.process.ask({"target": asdict(self._target), "sources": sources})
        if not answer:
            del self._local.process  # the next batch gets a new one
            raise UserError("a build process ended before its answer; run the command again")
        if "error" in answer:
            raise UserError(answer["error"])
        return {source: from_json(Build, text) for source, text in zip(sources, answer["builds"], strict=True)}


def _batches(sources: Sequence[str], servers: int) -> Iterator[Sequence[str]]:
    """Batches shared out evenly, the first of each server smaller, so that who judges need not wait for whole ones."""
    start, most = 0, FIRST_BATCH
    while start < len(sources):
        size = min(most, math.ceil((len(sources) - start) / servers))
        for _ in range(servers):
            yield sources[start : start + size]
            start += size
        most = min(2 * most, MOST_A_BATCH)


def _gone(batch: "Future[dict[str, Build]]", source: str) -> bool:
    """Whether a source is to be sent again: its batch has ended, and no kernel of it lies in the cache."""
    if not batch.done():
        return False
    if batch.cancelled() or batch.exception():
        return True
    artifact = batch.result()[source].artifact
    return not artifact or not Path(artifact).exists()


def _awaited(batch: "Future[dict[str, Build]]", source: str) -> Build:
    return batch.result()[source]


def main() -> None:
    from cuda_l2.build.cuda import build_all  # noqa: PLC0415 - only in a server's own process
    from cuda_l2.records import to_json  # noqa: PLC0415

    os.nice(NICENESS)
    for line in sys.stdin:
        message = json.loads(line)
        fields = message["target"] | {"capability": tuple(message["target"]["capability"])}
        try:
            builds = build_all([Candidate(source) for source in message["sources"]], CudaTarget(**fields))
            answer: dict[str, object] = {"builds": [to_json(build) for build in builds]}
        except UserError as error:
            answer = {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - one source must not end the builds of all
            answer = {"error": f"building failed in a way it should not: {type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
