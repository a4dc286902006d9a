"""Which few kernels to keep, given what each would be worth to every shape: facility location by greedy and swaps."""

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
MOST_PASSES = 20


def choose(worth_SK: Matrix, weights_S: NDArray[np.float64], most: int) -> list[int]:
    """At most `most` columns whose weighted sum over rows of the largest worth is large; in order of their number.

    worth_SK: of kernel K to case S, 0 where it does not serve it. The greedy choice is at least 63 % of the best sum;
    swaps of one kernel for another then go on until none helps, or MOST_PASSES are done. What adds nothing is left out.
    """
    weighted_SK = worth_SK * weights_S[:, None].astype(np.float32)
    chosen: list[int] = []
    best_S = np.zeros(len(weighted_SK), np.float32)
    while len(chosen) < min(most, weighted_SK.shape[1]):
        gains_K = np.maximum(weighted_SK - best_S[:, None], 0).sum(axis=0, dtype=np.float64)
        gains_K[chosen] = -1
        k = int(gains_K.argmax())
        if gains_K[k] <= 0:
            break
        chosen.append(k)
        best_S = np.maximum(best_S, weighted_SK[:, k])
    for _ in range(MOST_PASSES):
        if not _swap_each(weighted_SK, chosen):
            break
    for k in list(chosen):
        others = [other for other in chosen if other != k]
        if not (weighted_SK[:, k] > weighted_SK[:, others].max(axis=1, initial=0)).any():
            chosen = others
    return sorted(chosen)


def _swap_each(weighted_SK: Matrix, chosen: list[int]) -> bool:
    """Give every chosen kernel's place, in turn, to the kernel that is worth most there; whether any place changed."""
    changed = False
    for place in range(len(chosen)):
        others = chosen[:place] + chosen[place + 1 :]
        rest_S = weighted_SK[:, others].max(axis=1, initial=0)
        gains_K = np.maximum(weighted_SK - rest_S[:, None], 0).sum(axis=0, dtype=np.float64)
        gains_K[others] = -1
        k = int(gains_K.argmax())
        if gains_K[k] > gains_K[chosen[place]] * (1 + 1e-6):
            chosen[place] = k
            changed = True
    return changed
