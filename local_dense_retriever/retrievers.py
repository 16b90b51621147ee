"""Retrievers, which find passages: their interface, BM25, Lucene, and the fusion of several rankings."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import bm25s
import numpy as np

from local_dense_retriever.corpus import Corpus
from local_dense_retriever.words import DEFAULT_LANGUAGE, Words

logger = logging.getLogger(__name__)

BM25_FACTS = "sleuth.json"
WORDS_VERSION = 2
"""Of the rules of `words.py`: an index and the queries to it must be split by the same ones."""
FUSED_DEPTH = 100
"""How far down a ranking counts in a fusion, and so the most passages a fusion gives."""


class Ranked(NamedTuple):
    """The number of a passage in the corpus, and its score (the higher, the better)."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which no one needs here
    score: float


class Retriever(Protocol):
    """The interface of a retriever; a server calls it from one thread at a time."""

    def encode(self, queries: Sequence[str]) -> Any:
        """Encode queries for `search`: embeddings [n, d] in float32, or, for BM25, the words of each query."""
        ...

    def search(self, encoded: Any, topk: int) -> list[list[Ranked]]:
        """The best passages for each encoded query, best first: at most `topk`, fewer if fewer match."""
        ...


class Bm25Retriever:
    """BM25 (Lucene's variant, by bm25s) over the words of `words.py`."""

    def __init__(self, index: bm25s.BM25, words: Words) -> None:
        self._index, self._words = index, words

    @classmethod
    def build(
        cls, passages: Iterable[dict[str, Any]], *, language: str = DEFAULT_LANGUAGE, show_progress: bool = False
    ) -> Bm25Retriever:
        """Index the passages' contents in memory; building takes some 100 bytes per word.

        Raises ValueError for an unknown language, or if the passages hold no words.
        """
        retriever = cls(bm25s.BM25(method="lucene"), Words(language))
        contents = (passage["contents"] for passage in passages)
        tokens = retriever._words.of_passages(contents, show_progress=show_progress)
        if not any(tokens.ids):
            raise ValueError(
                "BM25 finds no word in the corpus; expected passages of more than single letters and words like 'the': "
                "give another --corpus_path, or a dense --retriever_name"
            )
        retriever._index.index(tokens, show_progress=show_progress)
        return retriever

    def save(self, folder: Path | str, fingerprint: str) -> None:
        """Write the index into a folder; `fingerprint` is its corpus's."""
        (Path(folder) / BM25_FACTS).unlink(missing_ok=True)  # without it an interrupted save is no index
        self._index.save(folder, show_progress=False)
        facts = {
            "fingerprint": fingerprint,
            "language": self._words.language,
            "stemmed": self._words.stemmed,
            "words": WORDS_VERSION,
        }
        (Path(folder) / BM25_FACTS).write_text(json.dumps(facts))

    @classmethod
    def load(cls, folder: Path | str, corpus: Corpus, language: str | None = None) -> Bm25Retriever:
        """The index that `save` wrote, mapped into memory.

        Raises ValueError if it is an index of another corpus or another `language` (None: any language).
        """
        try:
            index = bm25s.BM25.load(folder, mmap=True)
            facts = json.loads((Path(folder) / BM25_FACTS).read_text())
            fingerprint, stemmed, version = facts["fingerprint"], facts["stemmed"], facts.get("words", 1)
            made_in = facts.get("language", DEFAULT_LANGUAGE)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder} holds no BM25 index ({error}); make one with build_index.py") from None
        if version != WORDS_VERSION:
            raise ValueError(
                f"the BM25 index {folder} splits texts into words by other rules (version {version}, this is "
                f"{WORDS_VERSION}); make it anew with build_index.py"
            )
        if language not in (None, made_in):
            raise ValueError(
                f"--language {language}: the BM25 index {folder} was made with --language {made_in}; leave the flag "
                f"out, or make the index anew with build_index.py"
            )
        retriever = cls(index, Words(made_in))
        indexed = retriever._index.scores["num_docs"]
        if indexed != len(corpus):
            raise ValueError(
                f"the BM25 index {folder} has {indexed} passages, the corpus {len(corpus)}; give the corpus that the "
                f"index was made of, or make the index anew with build_index.py"
            )
        if fingerprint != corpus.fingerprint:
            raise ValueError(f"the BM25 index {folder} is of another corpus; make it anew with build_index.py")
        if stemmed != retriever._words.stemmed:
            state = "with" if stemmed else "without"
            raise ValueError(f"the BM25 index {folder} was made {state} PyStemmer, so it must be searched {state} it")
        return retriever

    def encode(self, queries: Sequence[str]) -> list[list[str]]:
        return self._words.of_queries(queries)

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


class LuceneRetriever:
    """An index that pyserini made of the corpus, searched by pyserini, which needs Java."""

    def __init__(self, folder: Path | str, corpus: Corpus, threads: int = 4) -> None:
        """Open the index; ValueError if pyserini is not installed, or if index and corpus differ in size."""
        try:
            from pyserini.search.lucene import LuceneSearcher
        except ImportError as error:
            raise ValueError(
                f"{folder} is a Lucene index, but pyserini cannot be imported ({error}): pip install pyserini and "
                f"Java 21, or make an index with build_index.py, which needs neither"
            ) from None
        self._searcher = LuceneSearcher(str(folder))
        self._corpus, self._threads = corpus, threads
        self._places: dict[str, int] | None = None
        if self._searcher.num_docs != len(corpus):
            raise ValueError(
                f"the Lucene index {folder} has {self._searcher.num_docs} passages, the corpus {len(corpus)}; give "
                f"the corpus that the index was made of"
            )

    def encode(self, queries: Sequence[str]) -> list[str]:
        return list(queries)

    def search(self, encoded: Sequence[str], topk: int) -> list[list[Ranked]]:
        numbers = list(map(str, range(len(encoded))))
        found = self._searcher.batch_search(list(encoded), numbers, k=topk, threads=self._threads)
        return [[Ranked(self._place(hit.docid), float(hit.score)) for hit in found[number]] for number in numbers]

    def _place(self, identifier: str) -> int:
        """The number of the passage with this id; usually id and number are the same."""
        number = int(identifier) if identifier.isdecimal() else len(self._corpus)
        if number < len(self._corpus) and str(self._corpus[number].get("id")) == identifier:
            return number
        if self._places is None:
            self._places = {str(passage.get("id")): index for index, passage in enumerate(self._corpus)}
        return self._places[identifier]


class HybridRetriever:
    """Several retrievers, their rankings joined by reciprocal rank fusion.

    A passage's score is the sum of 1 / (60 + its rank) over the rankings that have it among their first FUSED_DEPTH
    (Cormack, Clarke, Buettcher, SIGIR 2009). FUSED_DEPTH does not depend on `topk`, so a larger `topk` never changes
    the first passages.
    """

    CONSTANT = 60

    def __init__(self, retrievers: Sequence[Retriever]) -> None:
        self._retrievers = retrievers

    def encode(self, queries: Sequence[str]) -> list[Any]:
        return [retriever.encode(queries) for retriever in self._retrievers]

    def search(self, encoded: Sequence[Any], topk: int) -> list[list[Ranked]]:
        found = [retriever.search(part, FUSED_DEPTH) for retriever, part in zip(self._retrievers, encoded, strict=True)]
        return [self._fuse(rankings)[:topk] for rankings in zip(*found, strict=True)]

    def _fuse(self, rankings: Sequence[Sequence[Ranked]]) -> list[Ranked]:
        scores: dict[int, float] = {}
        for ranking in rankings:
            for rank, hit in enumerate(ranking, start=1):
                scores[hit.index] = scores.get(hit.index, 0.0) + 1 / (self.CONSTANT + rank)
        return [Ranked(*item) for item in sorted(scores.items(), key=lambda item: (-item[1], item[0]))]


def load_bm25(index_path: Path | str | None, corpus: Corpus, language: str | None = None) -> Retriever:
    """BM25 from an index folder of this project or of pyserini; without a folder the index is built in memory.

    `language`: None uses that of the index, or English without one. Raises ValueError if the folder holds neither kind
    of index, or one of another corpus or language.
    """
    if index_path is None:
        return Bm25Retriever.build(corpus, language=language or DEFAULT_LANGUAGE)
    if any(Path(index_path).glob("segments_*")):
        if language is not None:
            raise ValueError(f"--language has no meaning with {index_path}, an index of Lucene, which has its own")
        return LuceneRetriever(index_path, corpus)
    return Bm25Retriever.load(index_path, corpus, language)
