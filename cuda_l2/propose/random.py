"""The search baseline: each choice uniform over its valid values."""

from cuda_l2.propose._base import Ordered


class RandomProposer(Ordered):
    """Uniform over valid values, choice by choice."""

    name = "random"


PROPOSER = RandomProposer
