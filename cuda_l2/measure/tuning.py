"""How cuBLASLt's algorithms are timed for a choice: by replays of a graph, or by the paper's single launches."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cuda_l2.machine.cuda.helpers import Helpers
from cuda_l2.measure import cuda_torch
from cuda_l2.measure.launches import Buffers, Enqueue, graphs, repeated
from cuda_l2.measure.sampler import Sampler
from cuda_l2.measure.selection import Effort, Selection, select
from cuda_l2.records import Gemm

PAPER_WARMUP, PAPER_ROUNDS = 50, 100
REPLAY_US, MOST_LAUNCHES = (300.0, 1000.0), 200
"""Device time of a sample, which has eight launches where they fit, and how many it may have."""
FINALISTS_S = 1.5
"""The finalists' rounds take about this long at most, in each layout."""
PROBE_US = 500.0
LONG_US, HEAT_S, REHEAT_S = 40.0, 0.2, 0.05
"""Launches this long bring the chip to its power limit: tuning starts from there, not from idle. Power settles over
some 100 ms; a layout that is tuned right behind the other one needs less."""
SHORT_US = 2000.0
"""A sample below this is timed behind another one, so that no host time is in it; in a longer one it is negligible."""


@dataclass(frozen=True)
class Tuner:
    """Times launches on one stream in interleaved rounds."""

    stream: int
    helpers: Helpers
    rng: np.random.Generator

    def by_replays(self, enqueues: Sequence[Enqueue], heat_s: float) -> Selection:
        """Interleaved replays of back-to-back launches, of all and then of the best.

        The chip is warm where launches are long enough to reach its power limit.
        """
        with graphs(self.stream, enqueues[:1]) as (probe,):
            once_us = probe.time() * 1e6
        few = max(1, min(8, round(PROBE_US / once_us)))  # alone, a short kernel's time is mostly its launch
        with graphs(self.stream, [repeated(enqueues[0], few)]) as (probe,):
            one_us = probe.time() / few * 1e6
        least, most = REPLAY_US
        launches = max(1, min(MOST_LAUNCHES, round(min(most, max(least, 8 * one_us)) / one_us)))
        replay_us = launches * one_us
        warm = 1 if replay_us < SHORT_US else 0
        with graphs(self.stream, [repeated(enqueue, launches) for enqueue in enqueues]) as timed:
            for number in range(int(heat_s * 1e6 / replay_us) if one_us > LONG_US else 0):
                timed[number % len(timed)].replay()

            def take(arm: int) -> float:
                """Microseconds a launch."""
                self.helpers.settle(self.stream)
                return timed[arm].time(warm) / launches * 1e6

            effort = Effort()
            round_us = min(effort.finalists, len(enqueues)) * replay_us * (1 + warm)
            rounds = max(8, min(effort.max_rounds, int(FINALISTS_S * 1e6 / round_us)))
            return select(Sampler(take, self.rng), len(enqueues), replace(effort, max_rounds=rounds))

    def quick(self, enqueue: Enqueue, launches: int) -> float:
        """Microseconds of a launch, roughly, to rank many: the lesser of two warm replays, or one long one."""
        with graphs(self.stream, [repeated(enqueue, launches)]) as (timed,):
            cold_us = timed.time(0) * 1e6
            taken_us = cold_us if cold_us >= SHORT_US else min(timed.time() for _ in range(2)) * 1e6
            return taken_us / launches

    def as_the_paper(self, gemm: Gemm, launches_on: Callable[[Buffers], Sequence[Enqueue]]) -> Selection:
        """Single launches behind an untimed one, fresh random operands every round, all in random order.

        gemm: with the layout of B. launches_on: the launches on operands.
        """
        a, b, c = cuda_torch.random_operands(gemm)
        runs = launches_on(Buffers(a.data_ptr(), b.data_ptr(), b.data_ptr(), c.data_ptr()))
        with graphs(self.stream, runs) as timed:
            sampler: Sampler[int] = Sampler(lambda arm: timed[arm].time() * 1e6, self.rng)
            for number in range(PAPER_WARMUP + PAPER_ROUNDS):
                a.normal_()
                b.normal_()
                torch.cuda.synchronize()
                sampler.round(range(len(timed)), kept=number >= PAPER_WARMUP)
        medians = [statistics.median_high(sampler.samples.of(arm)) for arm in range(len(runs))]
        return Selection(medians.index(min(medians)), tuple(medians), (PAPER_ROUNDS,) * len(runs), 0.0)
