"""Estimates of memory and disk."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest

from local_dense_retriever import sizes
from local_dense_retriever.sizes import MemoryEstimate, available_memory, check_disk, check_memory, index_bytes

WIKI = (21_015_324, 768)


@pytest.mark.parametrize("kind", ["flat", "flat_fp16", "ivf_pq", "hnsw"])
def test_index_sizes_are_those_of_faiss(kind: str, tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((3000, 64), dtype=np.float32)
    factory = {"flat": "Flat", "flat_fp16": "SQfp16", "ivf_pq": "IVF4,PQ16np", "hnsw": "HNSW32"}[kind]
    index = faiss.index_factory(64, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "index"))
    codebook = 256 * 64 * 4 + 4 * 64 * 4 if kind == "ivf_pq" else 0  # centroids, which matter in small indices only
    assert (tmp_path / "index").stat().st_size == pytest.approx(index_bytes(kind, 3000, 64) + codebook, rel=0.05)


def test_the_public_index_is_as_big_as_it_is() -> None:
    assert index_bytes("flat", *WIKI) / 1e9 == pytest.approx(64.6, abs=0.1)


def estimate(available: float, index: float = 64.6e9) -> MemoryEstimate:
    return MemoryEstimate(index=int(index), encoder=440_000_000, corpus=0, available=int(available))


def test_what_fits_is_let_through() -> None:
    check_memory(estimate(70e9), *WIKI, "flat")


@pytest.mark.parametrize(
    ("available", "said", "unsaid"),
    [
        (48e9, ["index 64.6 GB", "48.0 GB available", "--faiss_fp16", "32.3 GB", "ivf_pq", "4.2 GB"], ["No other"]),
        (16e9, ["ivf_pq", "4.2 GB"], ["--faiss_fp16"]),
        (2e9, ["No other kind", "bm25"], ["--faiss_fp16"]),
    ],
)
def test_a_refusal_says_what_would_fit(available: float, said: list[str], unsaid: list[str]) -> None:
    with pytest.raises(ValueError, match="memory: ") as error:
        check_memory(estimate(available), *WIKI, "flat")
    assert [text for text in said if text not in str(error.value)] == []
    assert [text for text in unsaid if text in str(error.value)] == []


def test_available_memory_is_plausible() -> None:
    assert 1e8 < available_memory() < 1e14


def test_disk_space_is_checked_with_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_disk(tmp_path / "not" / "there" / "yet", 1000, "x")
    monkeypatch.setattr(sizes.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10_000_000_000}))
    with pytest.raises(ValueError, match=r"embeddings: expected 64\.6 GB .* found 10\.0 GB; free 54\.6 GB"):
        check_disk(tmp_path, 64_600_000_000, "embeddings")
