"""What finds passages: the interface of a retriever, BM25, and the fusion of several retrievers' rankings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import bm25s
import numpy as np

logger = logging.getLogger(__name__)

RETRIEVER_NAMES = ("bm25",)


class Ranked(NamedTuple):
    """The number of a passage in the corpus, and how well it matches (the higher, the better)."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which no one needs here
    score: float


class Retriever(Protocol):
    """What a server needs of a retriever; called from one thread at a time."""

    def encode(self, queries: Sequence[str]) -> Any:
        """What `search` takes: embeddings [n, d] in float32, or the words of each query for BM25."""
        ...

    def search(self, encoded: Any, topk: int) -> list[list[Ranked]]:
        """For each encoded query its best passages, best first: at most `topk`, fewer if fewer match."""
        ...


class Bm25Retriever:
    """BM25 (Lucene's variant) over English word stems where PyStemmer is installed."""

    def __init__(self, index: bm25s.BM25) -> None:
        self._index = index
        self._stemmer = _english_stemmer()

    @classmethod
    def build(cls, passages: Sequence[dict[str, Any]]) -> Bm25Retriever:
        """An index of the passages' contents, in memory."""
        retriever = cls(bm25s.BM25(method="lucene"))
        tokens = retriever.encode([passage["contents"] for passage in passages])
        retriever._index.index(tokens, show_progress=False)
        return retriever

    def encode(self, queries: Sequence[str]) -> list[list[str]]:
        return bm25s.tokenize(
            list(queries), stopwords="en", stemmer=self._stemmer, return_ids=False, show_progress=False
        )

    def search(self, encoded: Sequence[Sequence[str]], topk: int) -> list[list[Ranked]]:
        return [self._search_one(words, topk) for words in encoded]

    def _search_one(self, words: Sequence[str], topk: int) -> list[Ranked]:
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        matching = np.flatnonzero(scores > 0)
        values = scores[matching]
        if len(values) > topk:  # partitioned without the zeros, which are most: among equals that is slow
            kept = np.flatnonzero(values >= np.partition(values, -topk)[-topk])
            matching, values = matching[kept], values[kept]
        order = np.argsort(-values, kind="stable")[:topk]  # ties in the corpus's order
        return list(map(Ranked, matching[order].tolist(), values[order].tolist()))


def _english_stemmer() -> Any:
    try:
        import Stemmer
    except ImportError:
        logger.warning("PyStemmer is not installed: BM25 compares whole words, not their stems")
        return None
    return Stemmer.Stemmer("english")


def load_retriever(name: str, passages: Sequence[dict[str, Any]]) -> Retriever:
    """The retriever of that name over the passages; ValueError names the choices."""
    if name != "bm25":
        raise ValueError(f"no retriever named {name!r}; --retriever_name takes one of: {', '.join(RETRIEVER_NAMES)}")
    return Bm25Retriever.build(passages)
