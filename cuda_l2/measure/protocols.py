"""How times are taken. Every protocol interleaves all arms in random order within each round.

offline: back-to-back launches, caches warm. server: single launches after exponential gaps, caches evicted.
paper: the paper's section 2.4, 10 s of warm-up and 30 s of single launches, mean of the ratios. search: offline,
short, for choosing among candidates; its figures select and are never reported. rotating (GPU): offline with operands
that exceed the cache.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Protocol:
    name: str
    round_s: float  # back-to-back launches fill this long; 0 times single launches
    min_rounds: int
    max_rounds: int
    halfwidth: float  # stop once the ratio's relative half-width is below this
    gap_s: float = 0.0  # mean of the exponential gap before a launch
    evict: bool = False  # write twice the last-level cache before each launch, on a CPU as much as pushes all out
    warmup_s: float = 0.0
    measure_s: float = 0.0  # run at least this long, whatever the interval
    selects: bool = False  # chooses among candidates: against the strongest baseline only, poor ones cut short
    check_every: int = 1  # rounds between comparisons of a launch element by element; projections check every launch
    seldom_every: int = 1  # rounds between samples of the baselines that are not the usual strongest
    rotates: bool = False  # operands and outputs of successive launches lie apart and exceed the cache together
    heat_s: float = 0.0  # a timed replay of what reaches the power limit takes this long, behind half of it
    mean: bool = False  # mean of ratios, as the paper reports, instead of the median
    fresh: bool = (
        False  # on a CPU every sample of a candidate is a new process's, which may lie better or worse in memory
    )

    def least_s(self, launch_s: float, arms: int) -> float:
        """The least time of a timing: a sample's launches fill a round, behind one that does not count."""
        sample_s = launch_s + max(self.round_s, launch_s) + self.gap_s
        return max(self.min_rounds * arms * sample_s, self.warmup_s + self.measure_s)


HEAT_S = 0.004
"""So that a heavy kernel is timed at the clock that it leaves itself; between samples a heater keeps the chip busy."""
MIN_BRIEF_ROUNDS = 11
"""With so many the interval lies within the second smallest and second largest, and what is timed in every second round
has an interval too."""

SEARCH = Protocol("search", round_s=0.004, min_rounds=6, max_rounds=10, halfwidth=0.015, selects=True, check_every=6)
FINALS = replace(SEARCH, name="finalists", min_rounds=16, max_rounds=24)
OFFLINE = Protocol("offline", round_s=0.012, min_rounds=12, max_rounds=40, halfwidth=0.005)
SERVER = Protocol("server", round_s=0, min_rounds=20, max_rounds=60, halfwidth=0.01, gap_s=0.001, evict=True)
PAPER = Protocol(
    "paper", round_s=0, min_rounds=2, max_rounds=1 << 30, halfwidth=0.0, warmup_s=10, measure_s=30, mean=True
)
ROTATING = replace(OFFLINE, name="rotating", rotates=True)
CPU_PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        SEARCH,
        FINALS,
        # 3 to 5 and 4 to 7 rounds for each of six pairs of processes (rigs/cpu.py), which differ by more than rounds do
        replace(OFFLINE, min_rounds=18, max_rounds=30),
        replace(SERVER, min_rounds=24, max_rounds=42),
        PAPER,
    )
}
CUDA_PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        replace(SEARCH, round_s=0.0004, min_rounds=6, max_rounds=9),
        replace(FINALS, round_s=0.001, heat_s=HEAT_S),
        replace(OFFLINE, round_s=0.002, min_rounds=15, max_rounds=60, heat_s=HEAT_S),
        replace(ROTATING, round_s=0.002, min_rounds=15, max_rounds=60, heat_s=HEAT_S),
        replace(SERVER, min_rounds=40, max_rounds=120),
        replace(SERVER, name="server-10ms", gap_s=0.01, min_rounds=40, max_rounds=120),
        PAPER,
    )
}
"""Device time has no jitter of a host's pipes: shorter rounds say as much."""


def brief(protocol: Protocol) -> Protocol:
    """The same with few and short rounds, always as many, for a thousand shapes; intervals say what that costs.

    What libraries compute is compared element by element in every third round, and by projection in all; the usually
    weaker baselines are timed in every second, on a GPU where launches are heavy in every fourth. Replays of those take
    half as long: more rounds tell more of a clock that power moves than longer ones.
    """
    if protocol.measure_s:
        return protocol
    least = max(MIN_BRIEF_ROUNDS, protocol.min_rounds * 3 // 8)
    return replace(
        protocol,
        round_s=protocol.round_s / 8,
        min_rounds=least,
        max_rounds=least,
        check_every=3,
        seldom_every=2,
        heat_s=protocol.heat_s / 2,
    )
