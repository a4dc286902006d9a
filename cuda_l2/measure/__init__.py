"""Times a correct candidate against baselines, interleaved in one run, every launch's output checked."""

from cuda_l2.measure.rounds import measure

__all__ = ["measure"]
