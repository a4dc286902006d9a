"""Whether other work took the cores while samples were timed; what was timed then says nothing of the arms.

Taking arms by turns does not help where they suffer differently: threads that wait for one another lose milliseconds
when one of them loses its core, and a single thread loses little. Signs, each measured around a sample or a round:
time that an arm's threads waited for a core in the scheduler's queue, time that a host gave to other guests, throttling
by a control group's quota, and three canaries: work of this process that takes longer when a core is shared or slow,
vector work that takes longer, at the same clock, where a core's other hardware threads compute, and a cache line that
two cores hand to and fro, which takes longer where a host has moved one of them.
"""

import contextlib
import ctypes
import errno
import functools
import hashlib
import json
import math
import os
import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path

from cuda_l2.machine.cpu import target as cpu_target
from cuda_l2.measure.clock import Clock
from cuda_l2.measure.other_work import NOTICED_CORES, Others, OtherWork, stolen_s
from cuda_l2.system import control_groups, paths
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import write_text
from cuda_l2.system.native import compiled
from cuda_l2.system.steps import step
from cuda_l2.system.text import counted

WAITED_SHARE, WAITED_S = 0.05, 0.001
"""A sample's threads may wait for a core this share of its time, and so long: the process that wakes them runs on for a
while on one of their cores. Another that wants a core takes it for milliseconds."""
STOLEN_SHARE = 0.05
"""Share of a round's time on all cores that others may take, counted in hundredths of a second."""
CANARY = bytes(1 << 16)
CANARY_TRIES = 3
SLOWER = 1.4
"""Times the median of what the canary took before: a clock that stays lower is no disturbance."""
CANARIES = 3
"""How many tell what is usual."""
EXCHANGE = Path(cpu_target.__file__).with_name("exchange.c")
EXCHANGES = 3000
FARTHER = 3.0
"""Times what exchanges of two cores usually take. 58 to 210 ns each were seen as a rule, for seconds or a minute 380 to
420: threads that wait for one another take up to twice as long then, and torch's took 1.14 times as long."""
CROWDING = EXCHANGE.with_name("crowding.c")
CROWDED = 1.2
"""Times what vector work on a core usually takes beside a chain of instructions. On two cores of a host it was 1.14 for
most of the time, and on one of them 1.4 to 1.8 for seconds. One thread of torch took 1.4 times as long then, 64x64x64
of ours as long as ever, larger products of ours 1.1 to 1.2 times."""
VALUES_KEPT = 1000
"""Number of values kept of a canary on a core, or two cores. What is usual is what a tenth of them did not exceed: a
clock that stays lower is no disturbance. A spell that has nine tenths of them passes for usual; of a hundred, one of
some ten seconds did."""
WRITTEN, WRITTEN_EVERY = 200, 20
"""Number of values left to the next process, evenly spread, and of new ones after which they are written anew: a
process that begins in a spell refuses it, and a machine that has changed passes within a few processes."""
PAUSE_S = 0.25
"""Between looks at what other work takes."""
WAITING = "waiting until the cores are quiet"
STOLEN = "the host of this virtual machine gave its cores to others"
THROTTLED = "a control group's quota stopped this program"
UNSEEN = "no other program was seen while waiting: if this is a virtual machine, its host may share or move the cores"


class Busy(Exception):
    """Other work kept the cores too busy to time anything; says what was seen."""


class Quiet:
    """Watches samples from here on, and waits for quiet. patience_s: from the first wait until it is given up."""

    def __init__(self, clock: Clock, patience_s: float) -> None:
        self._clock, self._patience_s = clock, patience_s
        self._patient_until = math.inf
        self.waited_s = 0.0
        """Seconds in which it waited for other programs, in total."""
        self._met: list[float] = []
        """Cores that other work kept busy in each look of a wait."""
        self._canaries_s: list[float] = []
        self._exchanges = self._looks = 0
        self._why = ""
        self.begin()

    def begin(self) -> None:
        """Samples of a round follow."""
        self._why = ""
        self._canary()
        self._crowding()
        self._exchange()
        self._began, self._stolen = self._clock.now(), stolen_s()
        self._throttled = _throttled()

    def sampled(self, seconds: float, waited_s: float) -> None:
        """An arm's sample took so long. waited_s: for a core, summed over its threads."""
        if waited_s > WAITED_S + WAITED_SHARE * seconds:
            said = f"threads together waited {1e3 * waited_s:.1f} ms for a core in a sample of {1e3 * seconds:.1f} ms"
            self._why = self._why or said

    def disturbed(self) -> str:
        """What took the cores since `begin`, in a few words; empty where nothing did."""
        seconds = self._clock.now() - self._began
        cores = len(os.sched_getaffinity(0))
        if stolen_s() - self._stolen > STOLEN_SHARE * seconds * cores:
            self._why = self._why or STOLEN
        if _throttled() != self._throttled:
            self._why = self._why or THROTTLED
        self._canary()
        self._crowding()
        self._exchange()
        return self._why

    def wait(self, why: str) -> None:
        """Return when others leave the cores alone; Busy where patience ends before."""
        start = self._clock.now()
        try:
            self._wait(why)
        finally:
            self.waited_s += self._clock.now() - start

    def _wait(self, why: str) -> None:
        now, watched = self._clock.now(), Others(self._clock)
        self._patient_until = min(self._patient_until, now + self._patience_s)
        with step(f"{WAITING} ({why})", max(0.0, self._patient_until - now)) as shown:
            while True:
                if self._clock.now() >= self._patient_until:
                    alone = self._met and max(self._met) < NOTICED_CORES and why not in (STOLEN, THROTTLED)
                    raise Busy("; ".join(filter(None, (why, watched.busiest() or (UNSEEN if alone else "")))))
                others = OtherWork(self._clock)
                self._clock.sleep(PAUSE_S)
                found = others.found()
                self._met += [found.cores] if found else []
                if found is None or found.cores < NOTICED_CORES:
                    return
                shown.name = f"{WAITING} (other work keeps {found.share:.0%} of {counted(found.of, 'core')} busy)"

    def _canary(self) -> None:
        taken = []
        for _ in range(CANARY_TRIES):
            start = self._clock.now()
            hashlib.sha256(CANARY).digest()
            taken.append(self._clock.now() - start)
        usual_s = statistics.median(self._canaries_s) if len(self._canaries_s) >= CANARIES else math.inf
        if min(taken) > SLOWER * usual_s:
            self._why = self._why or f"known work took {min(taken) / usual_s:.1f} times as long as before"
        self._canaries_s.append(min(taken))

    def _crowding(self) -> None:
        """One core after the other, so that two are looked at in each round."""
        cores = sorted(os.sched_getaffinity(0))
        core = cores[self._looks % len(cores)]
        self._looks += 1
        found = _crowding()(core)
        if not found:
            return  # the core has gone
        usual = _usual("crowding", core).with_one(found)
        if found > CROWDED * usual:
            self._why = (
                self._why
                or f"vector work on a core took {found / usual:.1f} times as long as before: something shares that core"
            )

    def _exchange(self) -> None:
        here, *others = sorted(os.sched_getaffinity(0))
        if not others:
            return
        there, taken = others[self._exchanges % len(others)], []
        self._exchanges += 1
        for _ in range(CANARY_TRIES):
            start = self._clock.now()
            if _exchange()(here, there, EXCHANGES) not in (0, errno.ETIMEDOUT):
                return  # no thread can be had, or a core has gone: nothing is known
            taken.append(self._clock.now() - start)
        usual_s = _usual("exchanges", here, there).with_one(min(taken))
        if min(taken) > FARTHER * usual_s:
            self._why = (
                self._why or f"two cores took {min(taken) / usual_s:.1f} times as long as before to exchange data"
            )


class _Usual:
    """What a canary usually gives, of this process and of earlier ones. path: where that is kept."""

    def __init__(self, path: Path) -> None:
        self._path, self._new = path, 0
        self._known = deque(_read(path), maxlen=VALUES_KEPT)

    def with_one(self, value: float) -> float:
        """What is usual, another one counted."""
        self._known.append(value)
        self._new += 1
        ordered = sorted(self._known)
        if self._new % WRITTEN_EVERY == 0:
            with contextlib.suppress(UserError):  # a cache that cannot be written
                write_text(self._path, json.dumps(ordered[:: -(-len(ordered) // WRITTEN)]))
        return ordered[len(ordered) // 10]


@functools.cache
def _usual(canary: str, *cores: int) -> _Usual:
    of = " ".join([cpu_target.detect().machine, *map(str, cores)])
    return _Usual(paths.cache_dir() / canary / f"{hashlib.sha256(of.encode()).hexdigest()[:16]}.json")


def _read(path: Path) -> list[float]:
    """What earlier processes left; nothing where it is missing or damaged."""
    try:
        kept = [float(seconds) for seconds in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return []
    return kept if all(0 < seconds < math.inf for seconds in kept) else []


@functools.cache
def _exchange() -> Callable[[int, int, int], int]:
    found: Callable[[int, int, int], int] = ctypes.CDLL(
        str(compiled(EXCHANGE, "-shared", "-fPIC", "-pthread"))
    ).exchange
    return found


@functools.cache
def _crowding() -> Callable[[int], float]:
    found: Callable[[int], float] = ctypes.CDLL(str(compiled(CROWDING, "-shared", "-fPIC", cpu_target.NATIVE))).crowding
    found.restype = ctypes.c_double  # type: ignore[attr-defined]
    return found


def _throttled() -> int:
    """Scheduler periods in which a quota was used up."""
    found = control_groups.throttling()
    return found.periods if found else 0
