"""Reads a corpus: one JSON object per line, `{"id", "contents"}`, where contents is `"Title"\\ntext`.

A `.jsonl` file stays on disk, whatever its size: it is mapped into memory, and an array of the lines' offsets
(8 bytes per passage, also mapped) is made once and kept beside it. A `.jsonl.gz` file cannot be mapped; it is read
into memory, and refused if it is big.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import mmap
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import orjson
import xxhash
from tqdm import tqdm

logger = logging.getLogger(__name__)

Passage = dict[str, Any]

MAX_PACKED_BYTES = 256 * 2**20
"""Of a .gz corpus. Wiki-18 has 4.7 GB packed and 14 GB unpacked, which would be three times that as objects."""

STALE_S = 3600
"""Age at which the unfinished file of a killed process is removed."""

OFFSETS_VERSION = 1
HEAD = 5
"""Numbers before the offsets: version, the corpus's bytes and modification time in ns, two halves of its hash."""

FLUSH_EVERY = 1 << 16


class Corpus(Sequence[Passage]):
    """The passages of a corpus, by number. Threads may share it."""

    fingerprint: str
    """A hash of the unpacked text (xxh3, 32 hex digits): equal for a file, its copies and its packed form."""


def open_corpus(path: Path | str, cache_dir: Path | str | None = None) -> Corpus:
    """The corpus of a `.jsonl` file, mapped, or of a small `.jsonl.gz` file, in memory.

    A passage needs a string `contents`, or `text` with an optional `title`, of which contents are made. Every line
    is checked when the offsets are made, which takes about 1 s for 300 MB; then opening takes no time. The offsets
    go to `<path>.offsets.npy`, or into `cache_dir` ($XDG_CACHE_HOME/sleuth, ~/.cache/sleuth) where the folder cannot
    be written to. They are made anew when the file's size or modification time has changed.

    Raises ValueError naming the line that is no such object, or if there is none at all, or a .gz file is too big.
    """
    path = _existing(path)
    if path.suffix != ".gz":
        return MappedCorpus(path, _offsets(path, cache_dir))
    if path.stat().st_size > MAX_PACKED_BYTES:
        raise ValueError(
            f"{path} has {path.stat().st_size / 1e9:.2f} GB; a packed corpus is read into memory, so at most "
            f"{MAX_PACKED_BYTES / 1e9:.2f} GB are taken: unpack it (gunzip --keep {path}) and give --corpus_path the "
            f"unpacked file, which stays on disk"
        )
    return ListedCorpus(path)


def read_corpus(path: Path | str) -> list[Passage]:
    """All passages of a small corpus as a list in memory. Raises what `open_corpus` raises."""
    path = _existing(path)
    if path.suffix == ".gz":
        return list(open_corpus(path))
    with path.open("rb") as file:
        return _some([to_passage(line, number, path) for number, line in _lines(file)], path)


def to_passage(line: bytes, number: int, path: Path | str) -> Passage:
    """The passage in a line; ValueError names the line (`number`, from 1) and quotes its beginning."""
    try:
        passage = orjson.loads(line)
    except ValueError as error:
        passage = _lenient(line, f"{path}, line {number}: expected JSON, found {line[:80]!r} ({error})")
    if isinstance(passage, dict):
        if isinstance(passage.get("contents"), str):
            return passage
        if isinstance(passage.get("text"), str):
            return {**passage, "contents": f'"{passage.get("title") or ""}"\n{passage["text"]}'}
    raise ValueError(f"{path}, line {number}: expected an object with 'contents', a string, found {line[:80]!r}")


def _lenient(line: bytes, message: str) -> Any:
    """Parse a line with Python's reader, which accepts what orjson does not: NaN, lone surrogates, huge numbers."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # the latter for thousands of nested brackets
        raise ValueError(message) from None


class ListedCorpus(Corpus):
    """A `.jsonl.gz` file, in memory."""

    def __init__(self, path: Path) -> None:
        digest = xxhash.xxh3_128()
        try:
            with gzip.open(path) as file:
                passages = [to_passage(line, number, path) for number, line in _lines(_hashed(file, digest))]
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(
                f"{path} cannot be unpacked ({error}); expected a whole .gz file: get it again, or give it its right "
                f"name if it is not packed"
            ) from None
        self._passages = _some(passages, path)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._passages)

    @overload
    def __getitem__(self, index: int) -> Passage: ...
    @overload
    def __getitem__(self, index: slice) -> list[Passage]: ...
    def __getitem__(self, index: int | slice) -> Passage | list[Passage]:
        return self._passages[index]


class MappedCorpus(Corpus):
    """A `.jsonl` file on disk, of which only the passages asked for are read."""

    def __init__(self, path: Path, offsets: np.ndarray) -> None:
        self._path = path
        self._offsets = offsets[HEAD:]  # [n + 1]: where each line with a passage starts, and where the file ends
        self.fingerprint = f"{int(offsets[3]):016x}{int(offsets[4]):016x}"
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):
            self._bytes.madvise(mmap.MADV_RANDOM)  # a passage is a page or two: read nothing around it

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Passage: ...
    @overload
    def __getitem__(self, index: slice) -> list[Passage]: ...
    def __getitem__(self, index: int | slice) -> Passage | list[Passage]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"passage {index} of {len(self)}")
        index %= len(self)
        start, end = int(self._offsets[index]), int(self._offsets[index + 1])
        line = self._bytes[start:end]
        try:
            return to_passage(line, 0, self._path)
        except ValueError:
            raise ValueError(
                f"{self._path}, passage {index} at byte {start}: no longer the passage that was there when the corpus "
                f"was opened, found {line[:80]!r}; the file must not change while it is in use: start again"
            ) from None

    def __iter__(self) -> Iterator[Passage]:
        with self._path.open("rb") as file:
            for number, line in _lines(file):
                yield to_passage(line, number, self._path)


def _existing(path: Path | str) -> Path:
    if not Path(path).is_file():
        raise ValueError(f"no corpus at {path}; give --corpus_path a .jsonl or .jsonl.gz file")
    return Path(path)


def _some(passages: list[Passage], path: Path | str) -> list[Passage]:
    if not passages:
        raise _empty(path)
    return passages


def _empty(path: Path | str) -> ValueError:
    return ValueError(f'{path} holds no passage; expected one JSON object a line, {{"id": ..., "contents": ...}}')


def _lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1."""
    return ((number, line) for number, line in enumerate(file, start=1) if line.strip())


def _hashed(file: Iterable[bytes], digest: xxhash.xxh3_128) -> Iterator[bytes]:
    for line in file:
        digest.update(line)
        yield line


def _offsets(path: Path, cache_dir: Path | str | None) -> np.ndarray:
    """The offsets [HEAD + n + 1] uint64, mapped: the kept ones if they belong to this file, else new ones."""
    beside = path.with_name(f"{path.name}.offsets.npy")
    elsewhere = _cache_path(path, cache_dir)
    for candidate in (beside, elsewhere):
        if (kept := _kept_offsets(candidate, path)) is not None:
            return kept
    try:
        _make_offsets(path, beside)
    except OSError as error:  # a read-only folder or file system, or a full one
        logger.info("the offsets cannot be kept beside the corpus (%s): %s", error, elsewhere)
        elsewhere.parent.mkdir(parents=True, exist_ok=True)
        _make_offsets(path, elsewhere)
        beside = elsewhere
    made = _kept_offsets(beside, path)
    if made is None:
        raise ValueError(f"{path} changed while it was read; start again when nothing writes to it")
    return made


def _cache_path(path: Path, cache_dir: Path | str | None) -> Path:
    folder = Path(cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sleuth")
    return folder / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}-{path.name}.offsets.npy"


def _kept_offsets(file: Path, corpus: Path) -> np.ndarray | None:
    """The offsets in `file`, if they are complete and belong to the corpus as it is now; else None."""
    try:
        offsets = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    stat = corpus.stat()
    current = (OFFSETS_VERSION, stat.st_size, stat.st_mtime_ns)
    whole = offsets.dtype == np.uint64 and offsets.ndim == 1 and len(offsets) > HEAD + 1
    return offsets if whole and tuple(map(int, offsets[:3])) == current else None


def _make_offsets(corpus: Path, file: Path) -> None:
    """Check every line and write the offsets, in constant memory; `file` appears whole or not at all."""
    _remove_stale(file)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as out:
            _write_header(out, 0)
            count = _write_offsets(corpus, out)
            out.seek(0)
            _write_header(out, count)  # numpy leaves room for the number to grow
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _remove_stale(file: Path) -> None:
    for partial in file.parent.glob(f"{file.name}.*.partial"):
        if time.time() - partial.stat().st_mtime > STALE_S:
            partial.unlink(missing_ok=True)


def _write_header(out: Any, count: int) -> None:
    """The beginning of a .npy file of `count` uint64 numbers."""
    fields = {"descr": "<u8", "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(out, fields)


def _write_offsets(corpus: Path, out: Any) -> int:
    """Append head and offsets to `out`; returns how many numbers these are."""
    stat, digest = corpus.stat(), xxhash.xxh3_128()
    head_at, start, count, pending = out.tell(), 0, 0, []
    out.write(bytes(8 * HEAD))
    with corpus.open("rb", buffering=1 << 20) as file, _progress(corpus, stat.st_size) as bar:
        for number, line in enumerate(_hashed(file, digest), start=1):
            if line.strip():
                to_passage(line, number, corpus)
                pending.append(start)
                count += 1
            start += len(line)
            if len(pending) == FLUSH_EVERY:
                out.write(np.array(pending, np.uint64))
                bar.update(start - bar.n)
                pending.clear()
        bar.update(start - bar.n)
    if not count:
        raise _empty(corpus)
    out.write(np.array([*pending, start], np.uint64))
    halves = divmod(digest.intdigest(), 1 << 64)
    out.seek(head_at)
    out.write(np.array([OFFSETS_VERSION, stat.st_size, stat.st_mtime_ns, *halves], np.uint64))
    return HEAD + count + 1


def _progress(corpus: Path, size: int) -> tqdm[Any]:
    return tqdm(total=size, desc=f"finding the lines of {corpus.name}", unit="B", unit_scale=True, delay=2)
