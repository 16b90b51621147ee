"""Dense retrieval with MiniLM over a part of the demo's corpus, beside brute force."""

from __future__ import annotations

import json
from pathlib import Path

import faiss
import numpy as np
import pytest

from local_dense_retriever import dense, sizes
from local_dense_retriever.corpus import Corpus, open_corpus
from local_dense_retriever.dense import PROBE, DenseRetriever, load_dense, open_index, read_description
from local_dense_retriever.presets import encoder_config
from tests.retriever.minilm import contents, minilm, passages

QUERIES = ["who composed operas?", "2001 film by Stanley Kubrick", "capital city", "a river in Europe"]


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return minilm().encode_passages(contents())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, vectors: np.ndarray) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    (folder / "corpus.jsonl").write_text("".join(json.dumps(passage) + "\n" for passage in passages()))
    index = faiss.IndexFlatIP(384)
    index.add(vectors)
    faiss.write_index(index, str(folder / "flat.index"))
    return folder


def load(folder: Path, index: str = "flat.index", name: str = "minilm", **options: object) -> DenseRetriever:
    return load_dense(
        encoder_config(name),
        corpus_of(folder),
        index_path=folder / index,
        corpus_path=folder / "corpus.jsonl",
        device="cpu",
        encoder_threads=1,
        **options,  # type: ignore[arg-type]
    )


def corpus_of(folder: Path) -> Corpus:
    return open_corpus(folder / "corpus.jsonl")


@pytest.mark.parametrize("half", [False, True])
def test_results_equal_brute_force(folder: Path, vectors: np.ndarray, half: bool) -> None:
    retriever = load(folder, faiss_fp16=half, faiss_threads=1)
    encoded = retriever.encode(QUERIES)
    assert encoded.shape == (len(QUERIES), 384)
    assert encoded.dtype == np.float32
    scores = encoded @ vectors.T
    for row, hits in zip(scores, retriever.search(encoded, 10), strict=True):
        best = np.argsort(-row, kind="stable")[:10]
        np.testing.assert_allclose([hit.score for hit in hits], row[best], atol=1e-3 if half else 1e-5)
        if not half:
            assert [hit.index for hit in hits] == best.tolist()


def test_fewer_passages_are_fewer(folder: Path) -> None:
    retriever = load(folder)
    (hits,) = retriever.search(retriever.encode(["x"]), 1000)
    assert sorted(hit.index for hit in hits) == list(range(300))
    assert retriever.search(retriever.encode([]), 3) == []


def test_placeholders_of_faiss_never_get_out(vectors: np.ndarray) -> None:
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(384), 384, 30, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    index.nprobe = 1  # so that a search sees a thirtieth
    retriever = DenseRetriever(minilm(), index)
    for hits in retriever.search(retriever.encode(QUERIES), 200):
        assert 0 < len(hits) < 200
        assert all(0 <= hit.index < 300 for hit in hits)


def test_distances_become_scores_the_higher_the_better(vectors: np.ndarray) -> None:
    index = faiss.IndexFlatL2(384)
    index.add(vectors)
    retriever = DenseRetriever(minilm(), index)
    (hits,) = retriever.search(retriever.encode(QUERIES[:1]), 5)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert hits[0].index == np.argmax(retriever.encode(QUERIES[:1]) @ vectors.T)


def test_an_index_of_another_size_is_refused(folder: Path, vectors: np.ndarray) -> None:
    index = faiss.IndexFlatIP(384)
    index.add(vectors[:-1])
    faiss.write_index(index, str(folder / "short.index"))
    with pytest.raises(ValueError, match="holds 299 vectors, but the corpus 300 passages"):
        load(folder, "short.index")


def test_an_index_of_another_dimension_is_refused(folder: Path) -> None:
    index = faiss.IndexFlatIP(768)
    index.add(np.zeros((300, 768), np.float32))
    faiss.write_index(index, str(folder / "wide.index"))
    with pytest.raises(ValueError, match=r"vectors of 768 dimensions, but the encoder .* makes 384"):
        load(folder, "wide.index")


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"corpus": "0" * 32}, "of another corpus of as many"), ({"probe": [1.0] + [0.0] * 383}, "another encoder")],
)
def test_an_index_of_another_corpus_or_encoder_is_refused(folder: Path, change: dict, reason: str) -> None:
    (folder / "other.index").write_bytes((folder / "flat.index").read_bytes())
    facts = {"corpus": corpus_of(folder).fingerprint, "encoder": {}}
    facts["probe"] = minilm().encode_queries([PROBE])[0].tolist()  # type: ignore[assignment]
    (folder / "other.index.json").write_text(json.dumps(facts))
    load(folder, "other.index")
    (folder / "other.index.json").write_text(json.dumps({**facts, **change}))
    with pytest.raises(ValueError, match=reason):
        load(folder, "other.index")


@pytest.mark.parametrize("content", ["", "[]", "3", '{"corpus": "x"}'])
def test_a_broken_description_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"x.index.json is broken .*; expected what build_index.py writes"):
        read_description(tmp_path / "x.index")


@pytest.mark.parametrize("content", [b"", b"no index", b"IxFI"])
def test_a_broken_index_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.index").write_bytes(content)
    with pytest.raises(ValueError, match="is no FAISS index, or is cut off"):
        open_index(tmp_path / "x.index")
    with pytest.raises(ValueError, match="no index at"):
        open_index(tmp_path / "y.index")


def test_a_cut_off_index_is_told(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.index").write_bytes((folder / "flat.index").read_bytes()[:100_000])
    with pytest.raises(ValueError, match="cut off"):
        open_index(tmp_path / "x.index")


def test_too_little_memory_is_told_before_the_encoder_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "available_memory", lambda: 100_000_000)
    monkeypatch.setattr(dense, "Encoder", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=r"memory: index 0\.5 MB"):
        load(folder)


def test_half_precision_of_other_kinds_is_refused(vectors: np.ndarray) -> None:
    index = faiss.IndexHNSWFlat(384, 8, faiss.METRIC_INNER_PRODUCT)
    with pytest.raises(ValueError, match="this one is hnsw"):
        dense.to_half(index)
    assert dense.index_kind(dense.to_half(faiss.IndexFlatIP(8))) == "flat_fp16"


def test_gpus_are_refused_where_faiss_has_none(folder: Path) -> None:
    if hasattr(faiss, "StandardGpuResources"):
        pytest.skip("this FAISS is built for GPUs")
    with pytest.raises(ValueError, match="built for CPUs"):
        load(folder, faiss_gpu=True)


def test_the_memory_of_a_halved_index_is_half(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[sizes.MemoryEstimate] = []
    monkeypatch.setattr(dense, "check_memory", lambda estimate, *_: seen.append(estimate))
    load(folder)
    load(folder, faiss_fp16=True)
    assert seen[1].index == seen[0].index // 2
    assert seen[0].encoder == 90_868_376
