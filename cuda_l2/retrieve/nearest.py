"""A bm25 index in memory over a few texts."""

from collections.abc import Sequence
from typing import Any

from cuda_l2.retrieve.chunks import words
from cuda_l2.system.files import imported


def bm25s() -> Any:
    """The package, an optional part; UserError without it."""
    return imported("bm25s", "retrieval needs", "llm")


def ranked(index: Any, query: str, count: int, weights: Any = None) -> list[tuple[int, float]]:
    """Places in an index of at most `count` texts that share a word with the query, and scores, the best first.

    weights: a factor of every text's score.
    """
    # each word once: one whose parts are words too, as fp16, must not outweigh the others
    wanted = list(dict.fromkeys(word for word in words(query) if word in index.vocab_dict))
    if not wanted:
        return []
    places, scores = index.retrieve([wanted], k=count, show_progress=False, weight_mask=weights)
    pairs = zip(places[0].tolist(), scores[0].tolist(), strict=True)
    return [(place, score) for place, score in pairs if score > 0]


class Nearest:
    """Finds the texts that share the rarest words with a query. UserError without the package bm25s."""

    def __init__(self, texts: Sequence[str]) -> None:
        package = bm25s()
        bags = [words(text) for text in texts]
        self._count = len(bags) if any(bags) else 0
        self._index = package.BM25()
        if self._count:
            self._index.index(bags, show_progress=False)

    def search(self, query: str, count: int) -> list[int]:
        """Indices of at most `count` texts that share a word with the query, the nearest first."""
        if not self._count:
            return []
        return [place for place, _ in ranked(self._index, query, min(count, self._count))]
