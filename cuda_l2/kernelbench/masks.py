"""Inputs that lie on a GPU before their call has its turn, and cannot be read there until it has.

A call's inputs are XORed with a stream that follows from a key of their own. A kernel of ours undoes it on the GPU
(`unmask` in machine/cuda/helpers.cu) once the judge has shown the key. Copying the inputs in each turn instead would
take longer than most kernels do.
"""

import secrets

import numpy as np
import torch

_STEP, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def new_key() -> int:
    """63 bits, as a counter of the shared memory holds."""
    return secrets.randbits(63)


def stream(key: int, first: int, words: int) -> np.ndarray:
    """So many outputs of splitmix64 from the first on, as uint64."""
    with np.errstate(over="ignore"):
        z = np.uint64(key) + np.arange(first + 1, first + words + 1, dtype=np.uint64) * _STEP
        z = (z ^ z >> np.uint64(30)) * _FIRST
        z = (z ^ z >> np.uint64(27)) * _SECOND
        masks: np.ndarray = z ^ z >> np.uint64(31)
    return masks


def mask(place: np.ndarray, values: torch.Tensor, key: int, first: int) -> None:
    """Put a tensor's bytes into a place of whole words, masked with the stream from word `first` on."""
    raw = values.contiguous().view(-1).view(torch.uint8).numpy()
    place[: raw.size] = raw
    place[raw.size :] = 0
    words = place.view(np.uint64)
    words ^= stream(key, first, words.size)
