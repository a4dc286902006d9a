"""One look at the files, at most once a second, for whoever asks: the page's server or a terminal."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cuda_l2.measure.clock import CLOCK, Clock
from cuda_l2.measure.gpu_state import GpuSample, GpuState
from cuda_l2.report.page.parts import Section
from cuda_l2.report.watch.followed import Watched
from cuda_l2.report.watch.shown import sections
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.running import running

EVERY_S = 1.0
DRAWN_SHARE, DRAWN_EVERY_S = 0.005, 30.0
"""A figure takes at most this share of a core, or is drawn again after this time."""


class Watcher(Closing):
    """Files of one path and the GPUs here. A context manager; threads may share it."""

    def __init__(
        self, path: Path, *, figures: bool, clock: Clock = CLOCK, today: Callable[[], float] = time.time
    ) -> None:
        """figures: whether they are drawn. today: seconds since the epoch. UserError for a file of another kind."""
        self.path, self._clock, self._today = path, clock, today
        self._watched, self._figures = Watched(path, clock.now), figures
        self._gpus, self._lost = _gpus()
        self._lock, self._looked = threading.Lock(), -EVERY_S
        self._sections: list[Section] = []
        self._drawn: dict[str, tuple[object, str, float]] = {}
        """By a figure's key: what it is of, its SVG, and when it may be drawn again."""

    def look(self) -> list[Section]:
        """What there is to show; a look younger than `EVERY_S` serves."""
        with self._lock:
            if self._clock.now() - self._looked >= EVERY_S:
                self._sections = self._look()
                self._looked = self._clock.now()
            return self._sections

    def close(self) -> None:
        for gpu in self._gpus:
            gpu.close()

    def _look(self) -> list[Section]:
        files = self._watched.poll()
        runs = []
        for path in dict.fromkeys([self.path, *(each.path for each in files)]):
            with contextlib.suppress(OSError):
                runs += running(path)
        return sections(self.path, files, runs, self._sampled(), self._today(), self._draw)

    def _sampled(self) -> list[GpuSample]:
        try:
            return [gpu.sample() for gpu in self._gpus]
        except self._lost:  # a GPU has gone
            return []

    def _draw(self, key: str, of: object, make: Callable[[], str]) -> str:
        if not self._figures:
            return ""
        before, svg, again = self._drawn.get(key, (None, "", 0.0))
        began = self._clock.now()
        if svg and (before == of or began < again):
            return svg
        svg = make()
        took = self._clock.now() - began
        self._drawn[key] = of, svg, began + min(DRAWN_EVERY_S, took / DRAWN_SHARE)
        return svg


def _gpus() -> tuple[list[GpuState], type[Exception]]:
    """Every GPU that the driver names, none where there is no driver, and what NVML raises."""
    try:
        import pynvml  # noqa: PLC0415
    except ImportError:
        return [], UserError
    lost: type[Exception] = pynvml.NVMLError
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
        return [GpuState(pynvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles], lost
    except (lost, UserError):
        return [], lost
