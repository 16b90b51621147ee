"""What finds passages: the interface of a retriever, and BM25."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import bm25s
import numpy as np

logger = logging.getLogger(__name__)

RETRIEVER_NAMES = ("bm25",)


class Hit(NamedTuple):
    """A passage as it stands in the corpus, and how well it matches (the higher, the better)."""

    document: dict[str, Any]
    score: float


class Retriever(Protocol):
    """What a server needs of a retriever."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """For each query its best passages, best first: at most `topk`, fewer if fewer match.

        Called from one thread at a time.
        """
        ...


class Bm25Retriever:
    """BM25 (Lucene's variant) in memory, over English word stems where PyStemmer is installed."""

    def __init__(self, passages: Sequence[dict[str, Any]]) -> None:
        self._passages = passages
        self._stemmer = _english_stemmer()
        tokens = self._tokenize([passage["contents"] for passage in passages])
        self._index = bm25s.BM25(method="lucene")
        self._index.index(tokens, show_progress=False)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return [self._search_one(words, topk) for words in self._tokenize(queries)]

    def _tokenize(self, texts: Sequence[str]) -> list[list[str]]:
        return bm25s.tokenize(list(texts), stopwords="en", stemmer=self._stemmer, return_ids=False, show_progress=False)

    def _search_one(self, words: list[str], topk: int) -> list[Hit]:
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        threshold = np.partition(scores, -topk)[-topk] if topk < len(scores) else 0.0
        candidates = np.flatnonzero((scores >= threshold) & (scores > 0))
        best = candidates[np.argsort(-scores[candidates], kind="stable")][:topk]  # ties in the corpus's order
        return [Hit(self._passages[index], float(scores[index])) for index in best]


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
    return Bm25Retriever(passages)
