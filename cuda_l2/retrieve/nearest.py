"""A bm25 index in memory over a few texts."""

from collections.abc import Sequence
from typing import Any

from cuda_l2.retrieve.chunks import words
from cuda_l2.system.errors import UserError


def bm25s() -> Any:
    """The package, an optional part; UserError without it."""
    try:
        import bm25s  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise UserError(f"retrieval needs the package {error.name}: pip install 'cuda-l2[llm]'") from None
    return bm25s


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
        wanted = list(dict.fromkeys(word for word in words(query) if word in self._index.vocab_dict))
        if not wanted:
            return []
        places, scores = self._index.retrieve([wanted], k=min(count, self._count), show_progress=False)
        pairs = zip(places[0].tolist(), scores[0].tolist(), strict=True)
        return [place for place, score in pairs if score > 0]
