"""sm90_wave's kernels in all widths of wgmma, multiples of 8, and with K split where operands are swapped, too.

A family of its own and no values of sm90_wave's choices: those would give recorded worlds, trained weights and tables
another schedule space. What wins is in the pack's tables.
"""

from pathlib import Path

from cuda_l2.families import _sm90_wave_space as space
from cuda_l2.families.sm90_wave import Wave


class Fitted(Wave):
    """A tile is as wide as the rows of A need, or as a part of B that gives each multiprocessor one."""

    name = "sm90_fitted"
    searched = False
    fitted = True
    choices = space.FITTED

    @property
    def source(self) -> Path:
        return Path(__file__).with_name("sm90_wave.cu")


FAMILY = Fitted()
