"""Clocks, power and temperature of the GPU around timed rounds, and whether they drifted between arms.

A reading takes about 45 us; the driver renews its readings every 30 to 100 ms and gives power as an average of the last
second, so arms that alternate faster share a reading and only what lasts tells them apart. A chip whose power is
limited wanders by 10 % within a second, for all arms alike: clocks are compared within rounds, as times are.
"""

import contextlib
import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cuda_l2.measure.clock import CLOCK, Clock
from cuda_l2.records import Conditions
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError

DRIFT_LIMIT = 0.015
"""SM clocks of two arms further apart than this make a run that is repeated."""
FRESH_S = 0.005
"""A reading serves so long: a small part of the time between the driver's own."""
FEW_ROUNDS = 6
"""Below so many shared rounds a median is one reading of a clock that wanders: there all readings must agree."""
REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display clocks",
}


@dataclass(frozen=True, slots=True)
class GpuSample:
    """The GPU at one moment."""

    sm_mhz: int
    memory_mhz: int
    power_w: float
    temperature_c: int
    limited_by: tuple[str, ...]  # why the clock is not higher; empty where nothing holds it


class GpuState(Closing):
    """Reads one GPU's state through NVML. A context manager."""

    def __init__(self, pci_bus_id: str = "", clock: Clock = CLOCK) -> None:
        """pci_bus_id as in 0000:1B:00.0; the first GPU where it is left out."""
        import pynvml  # noqa: PLC0415

        self._nvml: Any = pynvml
        self._now = clock.now
        self._last: tuple[float, GpuSample] | None = None
        """When it was read, by the clock, and what."""
        try:
            pynvml.nvmlInit()
            self._device = (
                pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id) if pci_bus_id else pynvml.nvmlDeviceGetHandleByIndex(0)
            )
        except pynvml.NVMLError as error:
            raise UserError(f"NVML cannot read the GPU's clocks: {error}; is the driver installed?") from None

    def sample(self) -> GpuSample:
        """The state now, or up to `FRESH_S` ago."""
        now = self._now()
        if self._last is None or now - self._last[0] > FRESH_S:
            self._last = now, self._read()
        return self._last[1]

    def _read(self) -> GpuSample:
        nvml, device = self._nvml, self._device
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(device)
        return GpuSample(
            sm_mhz=nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
            memory_mhz=nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM),
            power_w=nvml.nvmlDeviceGetPowerUsage(device) / 1000,
            temperature_c=nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
            limited_by=tuple(name for bit, name in REASONS.items() if reasons & bit),
        )

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


class Drift:
    """Samples by arm, taken in or right after its rounds, and whether the arms ran at the same clock.

    Two arms' clocks are compared in the rounds that both were sampled in, by the median of their ratio: an arm that is
    sampled in some of the rounds alone is not held to account for what the chip did in the others. Of few rounds it is
    the least ratio, or where the arms took turns at being faster none.
    """

    def __init__(self) -> None:
        self._rounds: dict[int, dict[str, GpuSample]] = defaultdict(dict)

    def add(self, arm: str, number: int, sample: GpuSample) -> None:
        """number: of the round. An arm has one sample in it, the last one given."""
        self._rounds[number][arm] = sample

    @property
    def spread(self) -> float:
        """How far apart any two arms' SM clocks are, relative to the lower; 0 where no two shared a round."""
        return self._furthest()[0]

    @property
    def reason(self) -> str:
        """In one line, why the run should be repeated; empty where the arms met the same clock."""
        spread, *arms = self._furthest()
        if spread <= DRIFT_LIMIT:
            return ""
        shared = [found for found in self._rounds.values() if set(arms) <= found.keys()]
        high, low = (f"{statistics.median(found[arm].sm_mhz for found in shared):.0f} MHz during {arm}" for arm in arms)
        return f"the SM clock drifted: {high}, {low}"

    def conditions(self) -> Conditions:
        """Medians over all arms, the clocks' range, what held them, and whether they drifted."""
        samples = self._samples()
        if not samples:
            return Conditions()
        return Conditions(
            sm_mhz=statistics.median(sample.sm_mhz for sample in samples),
            sm_mhz_range=(min(sample.sm_mhz for sample in samples), max(sample.sm_mhz for sample in samples)),
            memory_mhz=statistics.median(sample.memory_mhz for sample in samples),
            power_w=statistics.median(sample.power_w for sample in samples),
            temperature_c=statistics.median(sample.temperature_c for sample in samples),
            limited_by=tuple(sorted({reason for sample in samples for reason in sample.limited_by})),
            clock_spread_of_arms=self.spread,
            drifted=self.reason,
        )

    def _samples(self) -> list[GpuSample]:
        return [sample for arms in self._rounds.values() for sample in arms.values()]

    def _furthest(self) -> tuple[float, str, str]:
        """The largest spread of two arms, the faster and the slower one."""
        ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
        for found in self._rounds.values():
            for one, other in itertools.permutations(found, 2):
                ratios[one, other].append(found[one].sm_mhz / found[other].sm_mhz)
        spreads = ((_apart(values), *arms) for arms, values in ratios.items())
        return max(spreads, default=(0.0, "", ""))


def _apart(ratios: Sequence[float]) -> float:
    """By how much one arm's clock was above another's, from their ratios in the rounds they shared; 0 where it was not.

    A reading is of what ran in the last 30 to 100 ms, so of several arms, while the chip wanders: among a dozen arms
    that share three rounds some pair's median is always a few percent off.
    """
    few = len(ratios) < FEW_ROUNDS
    return max(0.0, (min(ratios) if few else statistics.median(ratios)) - 1)
