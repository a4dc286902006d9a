"""Mutation operators, by group: small, named faults that a person or a model could make in a kernel.

A new operator is one function with `@operator(name, group)` in a file of this folder.
"""

from mutation.operators import accumulator, bounds, contract, epilogue, index, split, synchronisation
from mutation.operators._base import OPERATORS, Edit, Operator

GROUPS = tuple(module.GROUP for module in (synchronisation, bounds, accumulator, index, epilogue, split, contract))

__all__ = ["GROUPS", "OPERATORS", "Edit", "Operator"]
