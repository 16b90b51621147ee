"""Embeddings of a corpus on disk: written shard by shard, resumable after a kill at any moment, never mixed.

For each of n shards a folder holds `embeddings-00001-of-0000n.npy` (float16, [rows, d]; shorter than its header says
until it is done) and beside it a `.json`, which names the corpus, the encoder, and how many rows are safely on disk.
The JSON is updated only after the rows are written, so a killed run continues after the last row that it counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from local_dense_retriever.corpus import Corpus
from local_dense_retriever.dense import PROBE, similar
from local_dense_retriever.encoders import Encoder
from local_dense_retriever.sizes import check_disk

CHUNK = 1024
"""Passages between two marks of progress, also what is sorted by length together."""

HALF = np.dtype("<f2")


@dataclass(frozen=True)
class Shard:
    """One of `count` equal parts of a corpus; `number` counts from 1."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise ValueError(f"--shard: found {self.number}/{self.count}, expected 1/{self.count} to n/n")

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The shard that a text such as `2/4`, the second of four, names."""
        if not (match := re.fullmatch(r"(\d+)/(\d+)", text)):
            raise ValueError(f"--shard: found {text!r}, expected a part of the whole such as 1/4, 2/4, 3/4 and 4/4")
        return cls(int(match[1]), int(match[2]))

    def rows(self, passages: int) -> range:
        """The numbers of the passages in this part."""
        return range(passages * (self.number - 1) // self.count, passages * self.number // self.count)

    def file(self, folder: Path) -> Path:
        return folder / f"embeddings-{self.number:05d}-of-{self.count:05d}.npy"


@dataclass(frozen=True)
class Origin:
    """The corpus and the encoder of some embeddings. Kept as JSON beside embeddings and indices."""

    corpus: str
    """The corpus's fingerprint."""
    passages: int
    encoder: dict[str, Any]
    """Its configuration."""
    dimension: int
    probe: list[float]
    """The embedding of `dense.PROBE` as a query, which distinguishes encoders of the same name."""

    @classmethod
    def of(cls, corpus: Corpus, encoder: Encoder) -> Origin:
        probe = [round(float(value), 6) for value in encoder.encode_queries([PROBE])[0]]
        return cls(corpus.fingerprint, len(corpus), encoder.describe(), encoder.dimension, probe)

    def check(self, other: Origin, what: str) -> None:
        """Raise ValueError unless both have the same corpus and encoder."""
        if (self.corpus, self.passages) != (other.corpus, other.passages):
            raise ValueError(
                f"{what} is of another corpus ({other.passages:,} passages, fingerprint {other.corpus}; this one has "
                f"{self.passages:,} and {self.corpus}); choose another --save_dir, or remove {what}"
            )
        same = similar(np.array(self.probe), np.array(other.probe))
        if not same or _settings(self.encoder) != _settings(other.encoder):
            raise ValueError(
                f"{what} was made by another encoder ({other.encoder}; this is {self.encoder}); choose another "
                f"--save_dir, or remove {what}"
            )


def _settings(encoder: dict[str, Any]) -> dict[str, Any]:
    """The configuration without the model's location: whether a copy elsewhere is the same, the probe shows."""
    return {key: value for key, value in encoder.items() if key not in ("model", "passage_model")}


def write_embeddings(corpus: Corpus, encoder: Encoder, folder: Path, shard: Shard, *, chunk: int = CHUNK) -> None:
    """Encode the passages of a shard, from where an earlier run stopped. On disk, each number takes 2 bytes.

    Raises ValueError if the folder holds embeddings of another corpus, encoder or number of shards, or if the disk is
    too small.
    """
    folder.mkdir(parents=True, exist_ok=True)
    origin, rows, file = Origin.of(corpus, encoder), shard.rows(len(corpus)), shard.file(folder)
    _check_neighbours(folder, shard, origin)
    row_bytes = encoder.dimension * HALF.itemsize
    with file.open("ab+") as out:
        _lock(out, file)
        start = _start_of_rows(out, (len(rows), encoder.dimension))
        done = _rows_done(file, start, row_bytes)
        check_disk(folder, (len(rows) - done) * row_bytes, "embeddings")
        _mark(file, origin, done, len(rows))
        out.truncate(start + done * row_bytes)
        with _progress(shard, len(rows), done) as bar:
            while done < len(rows):
                part = rows[done : done + chunk]
                contents = [passage["contents"] for passage in corpus[part.start : part.stop]]
                out.write(encoder.encode_passages(contents).astype(HALF, "C").data)
                out.flush()
                os.fsync(out.fileno())
                done += len(part)
                _mark(file, origin, done, len(rows))
                bar.update(len(part))


def _lock(out: BinaryIO, file: Path) -> None:
    """Lock the file against other processes until it is closed or this process ends, for whatever reason."""
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another process is writing {file}; wait for it, or stop it") from None


def _start_of_rows(out: BinaryIO, shape: tuple[int, int]) -> int:
    """The position at which the rows begin in a file of `shape`; writes its header if it has none of that shape."""
    out.seek(0)
    with contextlib.suppress(ValueError):  # cut off within the header, or none of numpy's
        if np.lib.format.read_magic(out) == (1, 0):
            found, _, dtype = np.lib.format.read_array_header_1_0(out)
            if (found, dtype) == (shape, HALF):
                return out.tell()
    out.truncate(0)
    np.lib.format.write_array_header_1_0(out, {"descr": HALF.str, "fortran_order": False, "shape": shape})
    out.flush()
    return out.tell()


def _progress(shard: Shard, total: int, done: int) -> tqdm[Any]:
    name = "passages" if shard.count == 1 else f"shard {shard.number}/{shard.count}"
    return tqdm(total=total, initial=done, desc=f"encoding {name}", unit="passages", mininterval=1, smoothing=0.05)


def _mark_path(file: Path) -> Path:
    return file.with_suffix(".json")


def _mark(file: Path, origin: Origin, done: int, total: int) -> None:
    """Record that `done` of the shard's `total` rows are on disk. The record is replaced in one step."""
    path = _mark_path(file)
    partial = path.with_suffix(f".json.{os.getpid()}")
    with partial.open("w") as out:
        json.dump({"done": done, "total": total, "origin": asdict(origin)}, out)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(path)


def _read_mark(path: Path) -> tuple[int, int, Origin]:
    """The rows done, all rows, and their origin; ValueError if the file is not one of ours."""
    try:
        mark = json.loads(path.read_text())
        return int(mark["done"]), int(mark["total"]), Origin(**mark["origin"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not say how far the embeddings beside it are ({error}); remove both") from None


def _rows_done(file: Path, start: int, row_bytes: int) -> int:
    """How many rows an earlier run of this shard wrote; 0 if its file is missing or too short."""
    if not _mark_path(file).is_file() or not file.is_file():
        return 0
    done, _, _ = _read_mark(_mark_path(file))
    return min(done, (file.stat().st_size - start) // row_bytes)


def _check_neighbours(folder: Path, shard: Shard, origin: Origin) -> None:
    """Raise ValueError if other embeddings in the folder have another corpus, encoder or number of shards."""
    for mark in sorted(folder.glob("embeddings-*-of-*.json")):
        count = int(mark.stem.rsplit("-", 1)[1])
        if count != shard.count:
            raise ValueError(
                f"{folder} holds embeddings in {count} shards ({mark.name}), --shard asks for {shard.count}; go on "
                f"with --shard n/{count}, or remove them"
            )
        origin.check(_read_mark(mark)[2], str(mark))


class Embeddings:
    """Complete embeddings of a corpus [n, d], mapped from all shards of a folder."""

    def __init__(self, folder: Path) -> None:
        """Open all shards; ValueError, which names them, if some are missing or not done."""
        marks = sorted(folder.glob("embeddings-*-of-*.json"))
        if not marks:
            raise ValueError(f"no embeddings in {folder}; run build_index.py with --corpus_path and the encoder first")
        count = int(marks[0].stem.rsplit("-", 1)[1])
        shards = [Shard(number, count) for number in range(1, count + 1)]
        missing = [shard for shard in shards if not _is_whole(shard.file(folder))]
        if missing:
            names = ", ".join(f"{shard.number}/{count}" for shard in missing)
            raise ValueError(f"the embeddings in {folder} are not complete: run --shard {names} first")
        self.origin = _read_mark(marks[0])[2]
        self._parts = [np.load(shard.file(folder), mmap_mode="r") for shard in shards]
        assert len(self) == self.origin.passages

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def blocks(self, rows: int = 65536) -> Iterator[np.ndarray]:
        """All embeddings in order, float32, in blocks of at most `rows`."""
        for part in self._parts:
            for start in range(0, len(part), rows):
                yield part[start : start + rows].astype(np.float32)

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Random rows [min(count, n), d], float32, in the order of the corpus."""
        chosen = np.sort(rng.choice(len(self), min(count, len(self)), replace=False))
        starts = np.cumsum([0, *map(len, self._parts)])
        parts = [
            part[chosen[(chosen >= start) & (chosen < start + len(part))] - start]
            for start, part in zip(starts[:-1], self._parts, strict=True)
        ]
        return np.concatenate(parts).astype(np.float32)


def _is_whole(file: Path) -> bool:
    if not _mark_path(file).is_file() or not file.is_file():
        return False
    done, total, origin = _read_mark(_mark_path(file))
    try:
        rows = np.load(file, mmap_mode="r")
    except (ValueError, EOFError):  # shorter than its header says, or none of numpy's
        return False
    return done == total and rows.shape == (total, origin.dimension) and rows.dtype == HALF
