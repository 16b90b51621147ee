"""Builds FAISS indices of embeddings, and measures how many of the best passages they find."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from tqdm import tqdm

from local_dense_retriever.dense import description_path
from local_dense_retriever.embeddings import Embeddings
from local_dense_retriever.sizes import HNSW_LINKS, available_memory, check_disk, gigabytes, index_bytes, pq_bytes

logger = logging.getLogger(__name__)

INDEX_TYPES = ("flat", "flat_fp16", "ivf_pq", "hnsw")

RECALL_AT = (1, 3, 10, 100)

MIN_TRAINING = 39
"""Vectors for each centroid below which FAISS warns that clusters are poor."""

MAX_TRAINING = 64
"""Vectors for each cluster that they are learned from: for 21 million passages of 768 dimensions 3.6 GB."""

MAX_CODE_TRAINING = 65536
"""Vectors that the codes are learned from, at most: 256 a centroid, of which FAISS itself takes no more."""

CODEWORDS = 256
"""Of each part of a product quantizer: one byte."""


@dataclass(frozen=True)
class IndexOptions:
    """The options of an index; None chooses by the size of the corpus."""

    nlist: int | None = None
    """IVF: number of clusters [4 sqrt(n), or as many as the passages suffice to train]."""
    nprobe: int | None = None
    """IVF: clusters searched for a query [a sixteenth of them, at least 16]."""
    pq_bytes: int | None = None
    """IVF-PQ: bytes per vector [d/4]."""
    ef_construction: int = 200
    """HNSW: candidates considered when a vector is linked."""
    ef_search: int = 128
    """HNSW: candidates considered in a search."""
    seed: int = 1

    def clusters(self, passages: int) -> int:
        return self.nlist or max(1, min(int(4 * math.sqrt(passages)), passages // MIN_TRAINING))

    def training_size(self, passages: int) -> int:
        """IVF-PQ: the most vectors from which clusters and codes are learned."""
        return max(MAX_TRAINING * self.clusters(passages), MAX_CODE_TRAINING)

    def probes(self, clusters: int) -> int:
        return min(clusters, self.nprobe or max(16, clusters // 16))


@dataclass(frozen=True)
class Recall:
    """How an index compares with exact search over the same embeddings."""

    index_type: str
    size: int
    """Bytes on disk."""
    build_s: float
    query_ms: float
    """Mean time of a query, in batches of 64 on this machine's CPU."""
    recall: dict[int, float]
    """For each k the fraction of the exact first k that are among the index's first k."""


def build_index(embeddings: Embeddings, index_type: str, options: IndexOptions) -> Any:
    """A FAISS index of inner products over all embeddings, ready to be searched or written.

    Raises ValueError if the memory or the number of passages does not suffice.
    """
    passages, dimension = len(embeddings), embeddings.origin.dimension
    check_options(index_type, passages, dimension, options)
    needed = index_bytes(index_type, passages, dimension, options.pq_bytes)
    if index_type == "ivf_pq":
        needed += 4 * dimension * min(passages, options.training_size(passages))
    if needed > (room := available_memory()):
        smaller = {kind: index_bytes(kind, passages, dimension) for kind in ("flat_fp16", "ivf_pq")}
        raise ValueError(
            f"--index_type {index_type}: building it takes {gigabytes(needed)} of memory, {gigabytes(room)} are "
            f"available; " + ", ".join(f"{kind} takes {gigabytes(size)}" for kind, size in smaller.items())
        )
    makers: dict[str, Callable[[], Any]] = {
        "flat": lambda: faiss.IndexFlatIP(dimension),
        "flat_fp16": lambda: faiss.IndexScalarQuantizer(
            dimension, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
        ),
        "ivf_pq": lambda: _trained_ivf_pq(embeddings, options),
        "hnsw": lambda: _empty_hnsw(dimension, options),
    }
    index = makers[index_type]()
    rows = 1024 if index_type == "hnsw" else 16384  # often enough for a progress bar
    with tqdm(total=passages, desc=f"indexing ({index_type})", unit="passages", mininterval=1) as bar:
        for block in embeddings.blocks(rows):
            index.add(block)
            bar.update(len(block))
    return index


def check_options(index_type: str, passages: int, dimension: int, options: IndexOptions) -> None:
    """Raise ValueError if an index of this type cannot be made of this many passages of this dimension."""
    if index_type != "ivf_pq":
        return
    if passages < (least := MIN_TRAINING * CODEWORDS):
        raise ValueError(
            f"--index_type ivf_pq: expected at least {least:,} passages to learn the codes from, found {passages:,}; "
            f"so few are searched fastest by --index_type flat"
        )
    if dimension % (options.pq_bytes or 1):
        raise ValueError(f"--pq_bytes: found {options.pq_bytes}, expected a divisor of the dimension {dimension}")
    if options.clusters(passages) > passages:
        raise ValueError(f"--nlist: found {options.nlist}, expected at most as many as the {passages:,} passages")


def _empty_hnsw(dimension: int, options: IndexOptions) -> Any:
    index = faiss.IndexHNSWFlat(dimension, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = options.ef_construction
    index.hnsw.efSearch = options.ef_search
    return index


def _trained_ivf_pq(embeddings: Embeddings, options: IndexOptions) -> Any:
    """An IVF-PQ index whose clusters and product quantizer are learned from a sample of the embeddings."""
    passages, dimension = len(embeddings), embeddings.origin.dimension
    parts = options.pq_bytes or pq_bytes(dimension)
    clusters = options.clusters(passages)
    quantizer = faiss.IndexFlatIP(dimension)
    index = faiss.IndexIVFPQ(quantizer, dimension, clusters, parts, 8, faiss.METRIC_INNER_PRODUCT)
    index.nprobe = options.probes(clusters)
    index.cp.seed = index.pq.cp.seed = options.seed
    sample = embeddings.sample(options.training_size(passages), np.random.default_rng(options.seed))
    logger.info("learning %d clusters and %d bytes a vector from %d embeddings", clusters, parts, len(sample))
    index.train(sample)
    return index


def save_index(index: Any, path: Path, description: dict[str, Any]) -> None:
    """Write the index and the JSON that describes it; each file appears whole or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        _write(index, partial)
        description_path(path).unlink(missing_ok=True)  # never an old one beside a new index
        partial.replace(path)
        partial.write_text(json.dumps(description, indent=1))
        partial.replace(description_path(path))
    finally:
        partial.unlink(missing_ok=True)


def _write(index: Any, path: Path) -> None:
    try:
        faiss.write_index(index, str(path))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(
            f"{path.parent}: the index cannot be written ({reason}); free disk space there, then run the same command "
            f"again: the embeddings are kept"
        ) from None


def exact_search(embeddings: Embeddings, queries: np.ndarray, topk: int) -> np.ndarray:
    """The numbers [n, topk] of the passages with the greatest inner products, found in constant memory."""
    best = faiss.ResultHeap(len(queries), min(topk, len(embeddings)), keep_max=True)
    start = 0
    for block in embeddings.blocks():
        scores, numbers = faiss.knn(queries, block, min(topk, len(block)), metric=faiss.METRIC_INNER_PRODUCT)
        best.add_result(scores, numbers + start)
        start += len(block)
    best.finalize()
    return best.I


def recall_of(found: np.ndarray, exact: np.ndarray) -> dict[int, float]:
    """For each k of RECALL_AT up to the rankings' length: the mean over queries of |first k found & exact| / k."""
    ks = [k for k in RECALL_AT if k <= exact.shape[1]]
    return {
        k: float(np.mean([len(set(a[:k]) & set(b[:k])) / k for a, b in zip(found, exact, strict=True)])) for k in ks
    }


def build_and_measure(
    embeddings: Embeddings, index_types: Sequence[str], folder: Path, queries: np.ndarray, options: IndexOptions
) -> list[Recall]:
    """Build, save and measure the indices, each in a file `<type>.index` with a description beside it.

    `queries`: [q, d] float32. Raises ValueError if memory, disk or passages do not suffice.
    """
    exact = exact_search(embeddings, queries, max(RECALL_AT))
    reports = []
    for index_type in index_types:
        needed = index_bytes(index_type, len(embeddings), embeddings.origin.dimension, options.pq_bytes)
        check_disk(folder, needed, f"--index_type {index_type}")
        started = time.monotonic()
        index = build_index(embeddings, index_type, options)
        build_s = time.monotonic() - started
        found, query_ms = _timed_search(index, queries, exact.shape[1])
        path = folder / f"{index_type}.index"
        report = recall_of(found, exact)
        facts = {"index_type": index_type, "options": asdict(options), "recall": report}
        save_index(index, path, {**asdict(embeddings.origin), **facts})
        reports.append(Recall(index_type, path.stat().st_size, build_s, query_ms, report))
        del index  # before the next one is built
    return reports


def _timed_search(index: Any, queries: np.ndarray, topk: int, batch: int = 64) -> tuple[np.ndarray, float]:
    started = time.monotonic()
    found = [index.search(queries[start : start + batch], topk)[1] for start in range(0, len(queries), batch)]
    return np.concatenate(found), (time.monotonic() - started) / len(queries) * 1000
