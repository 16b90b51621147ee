"""Dense retrieval: an encoder and a FAISS index."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from local_dense_retriever.corpus import Corpus
from local_dense_retriever.encoders import Encoder
from local_dense_retriever.presets import EncoderConfig
from local_dense_retriever.retrievers import Ranked
from local_dense_retriever.sizes import (
    MemoryEstimate,
    available_memory,
    check_memory,
    corpus_bytes,
    encoder_bytes,
)

logger = logging.getLogger(__name__)

PROBE = "which text is this embedding of?"
"""What `build_index.py` encodes as a query and keeps, so that a server knows whether it has the same encoder."""

SAME_ENCODER = 0.99
"""Least cosine of the probe's embeddings by one encoder in two precisions or library versions."""

ADD_ROWS = 65536

GPU_KINDS = ("flat", "ivf_pq")


class DenseRetriever:
    """Finds the passages whose embeddings have the greatest inner product with the query's."""

    def __init__(self, encoder: Encoder, index: Any) -> None:
        """`index` is a FAISS index of the encoder's dimension; ValueError if it has another."""
        if index.d != encoder.dimension:
            raise ValueError(
                f"the index holds vectors of {index.d} dimensions, but the encoder {encoder.config.model} makes "
                f"{encoder.dimension}; give the encoder that the index was built with (--retriever_name, "
                f"--retriever_model), or build the index anew (build_index.py)"
            )
        self._encoder = encoder
        self._index = index
        self._sign = 1.0 if index.metric_type == faiss.METRIC_INNER_PRODUCT else -1.0

    def encode(self, queries: Sequence[str]) -> np.ndarray:
        """Embeddings [n, d] of the queries, float32."""
        return self._encoder.encode_queries(queries)

    def search(self, encoded: np.ndarray, topk: int) -> list[list[Ranked]]:
        """The best passages for each embedding; scores are inner products (negated distances in an L2 index)."""
        if not len(encoded):
            return []
        scores, numbers = self._index.search(np.ascontiguousarray(encoded, np.float32), min(topk, self._index.ntotal))
        return [
            [Ranked(int(number), self._sign * float(score)) for number, score in zip(*row, strict=True) if number >= 0]
            for row in zip(numbers, scores, strict=True)
        ]


def load_dense(
    encoder_config: EncoderConfig,
    corpus: Corpus,
    *,
    index_path: Path | str,
    corpus_path: Path | str,
    device: str | None = None,
    fp16: bool | None = None,
    max_batch_size: int = 64,
    encoder_threads: int | None = None,
    faiss_fp16: bool = False,
    faiss_gpu: bool = False,
    faiss_threads: int | None = None,
    check: bool = True,
) -> DenseRetriever:
    """A retriever over the index of `index_path`, which must be of this corpus and this encoder.

    The index is mapped, not read, where FAISS can (flat ones, also in half precision). `faiss_fp16` halves a flat
    index while it is loaded; `faiss_gpu` spreads the index over all GPUs, in half precision with `faiss_fp16`;
    `check` logs an estimate of the memory and refuses what exceeds it. Raises ValueError, with a remedy, for an index
    that is missing, broken, of another size, dimension or encoder, or too big.
    """
    index = open_index(index_path)
    check_corpus(index, corpus, index_path)
    if check:
        _check_memory(
            encoder_config, index, index_path, corpus_path, fp16=bool(fp16), halve=faiss_fp16, on_gpu=faiss_gpu
        )
    if faiss_threads is not None:
        faiss.omp_set_num_threads(faiss_threads)
    encoder = Encoder(encoder_config, device=device, fp16=fp16, batch_size=max_batch_size, threads=encoder_threads)
    DenseRetriever(encoder, index)  # dimensions first, before what takes long
    check_probe(encoder, index_path)
    if faiss_gpu:
        index = to_gpus(index, faiss_fp16)
    elif faiss_fp16:
        index = to_half(index)
    return DenseRetriever(encoder, index)


def open_index(path: Path | str) -> Any:
    """The FAISS index in a file, mapped if FAISS can; ValueError if there is none or it is broken."""
    if not Path(path).is_file():
        raise ValueError(
            f"no index at {path}; give --index_path a FAISS index: one of download.py, or one made of the corpus by "
            f"build_index.py"
        )
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(
            f"{path} is no FAISS index, or is cut off ({reason}); download it again or build it anew"
        ) from None


def check_corpus(index: Any, corpus: Corpus, path: Path | str) -> None:
    """Raise ValueError unless the index has one vector per passage and, if it names its corpus, is of this one."""
    remedy = "give the index and the corpus that belong together, or build the index anew (build_index.py)"
    if index.ntotal != len(corpus):
        raise ValueError(f"{path} holds {index.ntotal:,} vectors, but the corpus {len(corpus):,} passages; {remedy}")
    kept = read_description(path)
    if kept is not None and kept["corpus"] != corpus.fingerprint:
        raise ValueError(
            f"{path} is of another corpus of as many passages (fingerprint {kept['corpus']}, this one has "
            f"{corpus.fingerprint}); {remedy}"
        )


def description_path(index_path: Path | str) -> Path:
    """The path of the JSON beside an index that says from what the index was made."""
    return Path(f"{index_path}.json")


def read_description(index_path: Path | str) -> dict[str, Any] | None:
    """The description that `build_index.py` wrote beside the index; None for an index from elsewhere."""
    path = description_path(index_path)
    if not path.is_file():
        return None
    try:
        kept = json.loads(path.read_text())
        if missing := {"corpus", "encoder", "probe"} - set(kept):
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        return dict(kept)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is broken ({error}); expected what build_index.py writes: remove it, and build the index anew"
        ) from None


def check_probe(encoder: Encoder, index_path: Path | str) -> None:
    """Raise ValueError if the index holds an embedding of the probe, and this encoder embeds it differently."""
    kept = read_description(index_path)
    if kept is None:
        logger.info("no %s: that the index was made with this encoder cannot be checked", description_path(index_path))
        return
    if not similar(np.array(kept["probe"], np.float32), encoder.encode_queries([PROBE])[0]):
        raise ValueError(
            f"{index_path} was made with another encoder or other settings: {kept['encoder']}, but this is "
            f"{encoder.describe()}; give the same (--retriever_name, --retriever_model), or build the index anew"
        )


def similar(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two embeddings [d] come from the same encoder and text, up to precision."""
    if one.shape != other.shape:
        return False
    norms = np.linalg.norm(one) * np.linalg.norm(other)
    return bool(one @ other >= SAME_ENCODER * norms and 0.98 < (one @ one) / (other @ other) < 1.02)


def index_kind(index: Any) -> str:
    """The kind of a FAISS index, as in `sizes.index_bytes`, or the name of its class."""
    kinds = {"IndexFlat": "flat", "IndexScalarQuantizer": "flat_fp16", "IndexIVFPQ": "ivf_pq", "IndexHNSW": "hnsw"}
    while isinstance(index, faiss.IndexPreTransform):
        index = faiss.downcast_index(index.index)
    for name, kind in kinds.items():
        if isinstance(index, getattr(faiss, name)):
            return kind
    return type(index).__name__


def to_half(index: Any) -> Any:
    """A flat index in half precision, in memory; ValueError for another kind."""
    kind = index_kind(index)
    if kind == "flat_fp16":
        return index
    if kind != "flat":
        raise ValueError(f"--faiss_fp16 halves flat indices; this one is {kind}: leave the flag out")
    half = faiss.IndexScalarQuantizer(index.d, faiss.ScalarQuantizer.QT_fp16, index.metric_type)
    for start in range(0, index.ntotal, ADD_ROWS):
        half.add(index.reconstruct_n(start, min(ADD_ROWS, index.ntotal - start)))
    return half


def to_gpus(index: Any, fp16: bool) -> Any:
    """The index spread over all GPUs, each with a share of the vectors; ValueError where FAISS knows no GPU."""
    if not hasattr(faiss, "StandardGpuResources"):
        raise ValueError(
            "--faiss_gpu: this FAISS is built for CPUs; install a build for GPUs in its place (conda's faiss-gpu, "
            "faiss-gpu-cuvs or PyPI's faiss-gpu-cu12), or leave the flag out"
        )
    count = faiss.get_num_gpus()
    if not count:
        raise ValueError("--faiss_gpu: FAISS sees no GPU here (CUDA_VISIBLE_DEVICES?); leave the flag out")
    if (kind := index_kind(index)) not in GPU_KINDS:
        raise ValueError(f"--faiss_gpu: FAISS searches {', '.join(GPU_KINDS)} on GPUs, but this index is {kind}")
    options = faiss.GpuMultipleClonerOptions()
    options.shard = True
    options.useFloat16 = fp16
    logger.info("spreading the index over %d GPUs", count)
    try:
        return faiss.index_cpu_to_all_gpus(index, co=options, ngpu=count)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(
            f"--faiss_gpu: the index does not go to {count} GPUs ({reason}); take more of them, --faiss_fp16, or an "
            f"IVF-PQ index (build_index.py --index_type ivf_pq)"
        ) from None


def _check_memory(
    config: EncoderConfig,
    index: Any,
    index_path: Path | str,
    corpus_path: Path | str,
    *,
    fp16: bool,
    halve: bool,
    on_gpu: bool,
) -> None:
    kind = index_kind(index)
    size = Path(index_path).stat().st_size
    halve = halve and kind == "flat"
    estimate = MemoryEstimate(
        index=0 if on_gpu else size // 2 if halve else size,
        encoder=encoder_bytes(config.model, fp16),
        corpus=corpus_bytes(corpus_path),
        available=available_memory(),
    )
    check_memory(estimate, index.ntotal, index.d, "flat_fp16" if halve else kind)
