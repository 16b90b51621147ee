"""BM25 on disk, Lucene's place in the corpus, and fusion."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from local_dense_retriever.corpus import Corpus, open_corpus
from local_dense_retriever.retrievers import Bm25Retriever, HybridRetriever, LuceneRetriever, Ranked, load_bm25

TEXTS = ["The capital of France is Paris.", "The capital of Spain is Madrid.", "A tragedy by Shakespeare."]
QUERIES = ["capital of Spain", "tragedies", "xyzzy", "the"]


def make_corpus(folder: Path, texts: Sequence[str] = TEXTS, first_id: int = 0) -> Corpus:
    path = folder / f"corpus{len(texts)}-{first_id}.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), "contents": t}) + "\n" for i, t in enumerate(texts, first_id)))
    return open_corpus(path)


def search(retriever: Any, queries: Sequence[str], topk: int) -> list[list[Ranked]]:
    return retriever.search(retriever.encode(queries), topk)


def test_a_saved_bm25_index_finds_what_it_found_before(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    built = Bm25Retriever.build(corpus)
    built.save(tmp_path / "index", corpus.fingerprint)
    found = search(built, QUERIES, 2)
    assert [[hit.index for hit in hits] for hits in found] == [[1, 0], [2], [], []]
    assert (
        search(load_bm25(tmp_path / "index", corpus), QUERIES, 2)
        == found
        == search(load_bm25(None, corpus), QUERIES, 2)
    )


def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = make_corpus(tmp_path)
    Bm25Retriever.build(corpus).save(tmp_path / "index", corpus.fingerprint)
    with pytest.raises(ValueError, match="has 3 passages, the corpus 2"):
        load_bm25(tmp_path / "index", make_corpus(tmp_path, TEXTS[:2]))
    with pytest.raises(ValueError, match="of another corpus"):
        load_bm25(tmp_path / "index", make_corpus(tmp_path, TEXTS[::-1], first_id=1))
    with pytest.raises(ValueError, match="holds no BM25 index"):
        load_bm25(tmp_path, corpus)
    with pytest.raises(ValueError, match="made with --language english; leave the flag out"):
        load_bm25(tmp_path / "index", corpus, "german")
    monkeypatch.setitem(sys.modules, "Stemmer", None)
    with pytest.raises(ValueError, match="with PyStemmer"):
        load_bm25(tmp_path / "index", corpus)


def test_an_index_of_other_rules_for_words_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = make_corpus(tmp_path)
    Bm25Retriever.build(corpus).save(tmp_path / "index", corpus.fingerprint)
    facts = json.loads((tmp_path / "index/sleuth.json").read_text())
    del facts["words"], facts["language"]  # as before there were languages
    (tmp_path / "index/sleuth.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"other rules \(version 1, this is 2\); make it anew"):
        load_bm25(tmp_path / "index", corpus)


def test_a_saved_index_keeps_its_language(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, ["Die Häuser der Stadt", "Ein Baum", "Noch ein Baum"])
    Bm25Retriever.build(corpus, language="german").save(tmp_path / "index", corpus.fingerprint)
    for language in (None, "german"):
        loaded = load_bm25(tmp_path / "index", corpus, language)
        assert [[hit.index for hit in hits] for hits in search(loaded, ["das Haus", "der", "die"], 3)] == [[0], [], []]
    assert search(load_bm25(None, corpus, "none"), ["Haus"], 3) == [[]]


def test_a_corpus_without_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="BM25 finds no word in the corpus; expected"):
        Bm25Retriever.build(make_corpus(tmp_path, ["the", "", "a"]))


def lucene_folder(tmp_path: Path) -> Path:
    (tmp_path / "lucene").mkdir()
    (tmp_path / "lucene/segments_1").touch()
    return tmp_path / "lucene"


def test_a_lucene_index_without_pyserini_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyserini", None)
    with pytest.raises(ValueError, match="pip install pyserini"):
        load_bm25(lucene_folder(tmp_path), make_corpus(tmp_path))


@pytest.mark.parametrize("first_id", [0, 7])
def test_a_lucene_index_answers_the_numbers_of_passages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_id: int
) -> None:
    class Searcher:
        """Speaks pyserini's interface, which needs Java."""

        def __init__(self, folder: str) -> None:
            self.num_docs = 3

        def batch_search(self, queries: list[str], qids: list[str], k: int, threads: int) -> dict[str, list[Any]]:
            hits = [types.SimpleNamespace(docid=str(first_id + number), score=3.0 - number) for number in (2, 0, 1)]
            return {qid: hits[:k] if query != "xyzzy" else [] for query, qid in zip(queries, qids, strict=True)}

    module = types.ModuleType("pyserini.search.lucene")
    module.LuceneSearcher = Searcher  # type: ignore[attr-defined]
    for name in ("pyserini", "pyserini.search"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "pyserini.search.lucene", module)
    retriever = load_bm25(lucene_folder(tmp_path), make_corpus(tmp_path, first_id=first_id))
    assert isinstance(retriever, LuceneRetriever)
    assert search(retriever, ["a", "xyzzy"], 2) == [[Ranked(2, 1.0), Ranked(0, 3.0)], []]
    with pytest.raises(ValueError, match="has 3 passages, the corpus 2"):
        load_bm25(tmp_path / "lucene", make_corpus(tmp_path, TEXTS[:2]))
    with pytest.raises(ValueError, match="--language has no meaning"):
        load_bm25(tmp_path / "lucene", make_corpus(tmp_path), "german")


class Fixed:
    """Gives the same ranking to every query."""

    def __init__(self, *ranking: int) -> None:
        self.ranking = ranking

    def encode(self, queries: Sequence[str]) -> int:
        return len(queries)

    def search(self, encoded: int, topk: int) -> list[list[Ranked]]:
        return [[Ranked(index, -float(rank)) for rank, index in enumerate(self.ranking[:topk])]] * encoded


def test_fusion_sums_reciprocal_ranks() -> None:
    (hits,) = search(HybridRetriever([Fixed(5, 7, 9), Fixed(7, 5, 3)]), ["q"], 10)
    assert [hit.index for hit in hits] == [5, 7, 3, 9]  # equal ones in the corpus's order
    assert [hit.score for hit in hits] == pytest.approx([1 / 61 + 1 / 62, 1 / 61 + 1 / 62, 1 / 63, 1 / 63])


def test_fusion_gives_the_same_first_ones_whatever_topk_is() -> None:
    hybrid = HybridRetriever([Fixed(*range(100)), Fixed(*range(99, -1, -1))])
    (all_hits,) = search(hybrid, ["q"], 100)
    assert search(hybrid, ["q", "p"], 3) == [all_hits[:3]] * 2
    assert search(hybrid, [], 3) == []


def test_ties_keep_the_corpus_order(tmp_path: Path) -> None:
    retriever = Bm25Retriever.build([{"contents": f'"T{number}"\nsame words'} for number in range(5)])
    assert [hit.index for hit in search(retriever, ["same words"], 3)[0]] == [0, 1, 2]
