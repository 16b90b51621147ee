"""Estimates the memory and disk that index, encoder and corpus need, before anything big is loaded.

The sizes of indices follow from FAISS's file format, for vectors of d dimensions.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from sleuth.paths import nearest_existing

logger = logging.getLogger(__name__)

HNSW_LINKS = 32
"""M of the graph: 2M links of 4 bytes at the lowest level, M at the few above."""

WORKSPACE_BYTES = 600_000_000
"""The process itself: Python, torch, FAISS, the server; measured with MiniLM on a CPU."""

UNPACKED_FACTOR = 10
"""Memory of a packed corpus over its file's bytes: 3 unpacked, as Python objects and JSON 3 times that."""


@dataclass(frozen=True)
class MemoryEstimate:
    """How many bytes of memory a server will need, by part."""

    index: int
    encoder: int
    corpus: int
    available: int

    @property
    def total(self) -> int:
        return self.index + self.encoder + self.corpus + WORKSPACE_BYTES

    def __str__(self) -> str:
        return (
            f"memory: index {gigabytes(self.index)} + encoder {gigabytes(self.encoder)} + corpus "
            f"{gigabytes(self.corpus)} + process {gigabytes(WORKSPACE_BYTES)} = {gigabytes(self.total)}; "
            f"{gigabytes(self.available)} available"
        )


def gigabytes(count: float) -> str:
    """A size as text: in GB (10^9 bytes) from 0.1 GB on, in MB below."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def pq_bytes(dimension: int) -> int:
    """IVF-PQ's default bytes per vector: one for every 4 dimensions (or the nearest divisor of d)."""
    return max(parts for parts in range(1, dimension // 4 + 1) if dimension % parts == 0)


def index_bytes(kind: str, passages: int, dimension: int, code_bytes: int | None = None) -> int:
    """The bytes of an index of `kind` (flat, flat_fp16, ivf_pq, hnsw), in memory and on disk."""
    per_passage = {
        "flat": 4 * dimension,
        "flat_fp16": 2 * dimension,
        "ivf_pq": 8 + (code_bytes or pq_bytes(dimension)),  # the code and the passage's number
        "hnsw": 4 * dimension + 4 * 2 * HNSW_LINKS + 16,  # vector, links, and where they stand
    }
    return passages * per_passage[kind]


def encoder_bytes(folder: Path | str, fp16: bool) -> int:
    """The bytes of a model's weights in a local folder; 0 if it is elsewhere (usual encoders have 0.1 to 1.4 GB)."""
    files = list(Path(folder).glob("*.safetensors")) or list(Path(folder).glob("pytorch_model*.bin"))
    return sum(file.stat().st_size for file in files) // (2 if fp16 else 1)


def corpus_bytes(path: Path | str) -> int:
    """The memory that a corpus takes: its size if it is packed, 0 if it is mapped (the system can reclaim that)."""
    path = Path(path)
    return path.stat().st_size * UNPACKED_FACTOR if path.suffix == ".gz" else 0


def available_memory() -> int:
    """The bytes that this process can still get, from the machine or, if that is less, from its control group."""
    free = [psutil.virtual_memory().available]
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        root = Path("/sys/fs/cgroup")
        try:
            fields = dict(line.split() for line in (root / stat).read_text().splitlines())
            reclaimable = int(fields.get("inactive_file", fields.get("total_inactive_file", 0)))
            free.append(int((root / limit).read_text()) - int((root / used).read_text()) + reclaimable)
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return max(0, min(free))


def check_memory(estimate: MemoryEstimate, passages: int, dimension: int, kind: str) -> None:
    """Log the estimate; ValueError, which says what would fit, if it exceeds the available memory."""
    logger.info("%s", estimate)
    if estimate.total > estimate.available:
        raise ValueError(f"{estimate}. {what_would_fit(estimate, passages, dimension, kind)}")


def what_would_fit(estimate: MemoryEstimate, passages: int, dimension: int, kind: str) -> str:
    """A sentence that names the smaller kinds of index that would fit into the available memory."""
    room = estimate.available - (estimate.total - estimate.index)
    remedies = {
        "flat_fp16": "half precision (--faiss_fp16, or build_index.py --index_type flat_fp16)",
        "ivf_pq": "IVF-PQ (build_index.py --index_type ivf_pq; FAISS finds most, not all, of the best passages)",
    }
    sizes = {other: index_bytes(other, passages, dimension) for other in remedies if other != kind}
    fitting = [
        f"{remedies[other]}: {gigabytes(size)}" for other, size in sizes.items() if size < min(room, estimate.index)
    ]
    if fitting:
        return f"With the same {passages:,} passages of {dimension} dimensions fit: " + "; ".join(fitting)
    least = min(sizes.values(), default=estimate.index) + estimate.total - estimate.index
    return (
        f"No other kind of index over {passages:,} passages of {dimension} dimensions fits either (the smallest needs "
        f"{gigabytes(least)} in all): free memory, take a smaller corpus, or --retriever_name bm25"
    )


def check_disk(folder: Path, needed: int, what: str) -> None:
    """ValueError if the disk of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(nearest_existing(folder)).free
    if free < needed:
        raise ValueError(
            f"{what}: expected {gigabytes(needed)} of free disk space in {folder}, found {gigabytes(free)}; free "
            f"{gigabytes(needed - free)} or choose a folder on another disk"
        )
