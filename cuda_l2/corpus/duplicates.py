"""Detects duplicates: texts of the same tokens, or nearly the same runs of tokens (MinHash, then the exact share)."""

import hashlib
import re
import zlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cuda_l2.build.lexing import CPP_TOKEN

NEAR = 0.8
"""Two texts that share this much of their shingles (of both together) are one."""
SHINGLE = 5
"""Tokens in a row."""
BANDS, ROWS = 16, 4
"""Texts alike by 0.8 meet in a band with probability 0.9998, by 0.5 with 0.64; the exact share decides."""
Shingles = NDArray[np.uint64]
_TOKEN = re.compile(CPP_TOKEN.pattern + r"|[^\s\w]")
_random = np.random.default_rng(20)
_FACTORS = _random.integers(1, 1 << 63, BANDS * ROWS, dtype=np.uint64) | np.uint64(1)
_OFFSETS = _random.integers(0, 1 << 63, BANDS * ROWS, dtype=np.uint64)


def tokens(code: str) -> list[str]:
    """Words, numbers, strings and signs; comments and layout left out."""
    return [found for found in _TOKEN.findall(code) if not found.startswith(("/*", "//"))]


@lru_cache(8192)  # a model in training is asked about the same kernels at every step
def digest(code: str) -> str:
    """Hash of the tokens: equal where only comments and layout differ."""
    return hashlib.sha256("\0".join(tokens(code)).encode(errors="replace")).hexdigest()[:16]


def shingles(code: str) -> Shingles:
    """Hashes of every run of SHINGLE tokens, each once, sorted; of all tokens where there are fewer."""
    hashes = np.array([_hash(token) for token in tokens(code)], np.uint64)
    size = min(SHINGLE, len(hashes))
    count = len(hashes) - size + 1 if size else 0
    mixed = np.zeros(count, np.uint64)
    for i in range(size):
        mixed = (mixed ^ hashes[i : i + count]) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return np.unique(mixed)


class Duplicates:
    """Texts met so far."""

    def __init__(self) -> None:
        self._digests: set[str] = set()
        self._bands: dict[tuple[int, bytes], list[int]] = {}
        self._shingles: list[Shingles] = []

    def met(self, code: str, *, nearly: bool = True) -> str:
        """`same` or `near` where such a text was met before, else empty, and it counts as met from here on."""
        own = digest(code)
        if own in self._digests:
            return "same"
        self._digests.add(own)
        if not nearly:
            return ""
        found = shingles(code)
        if not len(found):
            return ""
        bands = _bands(found)
        others = {other for band in bands for other in self._bands.get(band, ())}
        if any(_share(found, self._shingles[other]) >= NEAR for other in others):
            return "near"
        for band in bands:
            self._bands.setdefault(band, []).append(len(self._shingles))
        self._shingles.append(found)
        return ""


def contained(found: Shingles, other: Shingles) -> float:
    """The share of `found` that is in `other` too."""
    return len(np.intersect1d(found, other, assume_unique=True)) / max(1, len(found))


def _share(one: Shingles, other: Shingles) -> float:
    both = len(np.intersect1d(one, other, assume_unique=True))
    return both / (len(one) + len(other) - both)


def _bands(found: Shingles) -> list[tuple[int, bytes]]:
    least = np.full(BANDS * ROWS, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(found), 1024):
        values = found[start : start + 1024, None] * _FACTORS + _OFFSETS
        values ^= values >> np.uint64(31)
        least = np.minimum(least, (values * np.uint64(0xBF58476D1CE4E5B9)).min(axis=0))
    return [(band, least[band * ROWS : (band + 1) * ROWS].tobytes()) for band in range(BANDS)]


@lru_cache(1 << 16)
def _hash(token: str) -> int:
    data = token.encode(errors="replace")
    return zlib.crc32(data) << 32 | zlib.adler32(data)
