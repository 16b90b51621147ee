"""Reads rows from parquet and JSONL files: `path`, `path@[a:b]`, or a Hugging Face data set.

It reads only the columns and rows that are asked for, and knows nothing of prompts or tokenizers.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sleuth.data.hub import fetch
from sleuth.data_path import SUFFIXES, DataPath

CHECKED_ROWS = 16
"""How many of the first rows are looked at before a run starts."""
BATCH_ROWS = 1024
"""Rows of a parquet file that are turned into Python objects at a time."""
BUFFER_BYTES = 1 << 16
"""How far a parquet column is read ahead. Without a buffer a look at the first rows reads all of the column."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Records:
    """Rows of a file: `rows[i]` is row `first + i` of the file; `columns` are all column names in the file.

    A row holds those of the requested columns that the file has.
    """

    path: str
    first: int
    columns: list[str]
    rows: list[Row]

    @property
    def padded(self) -> bool:
        """Whether nulls inside values may be padding: Arrow gives all dictionaries of a column the same keys."""
        return self.path.endswith(".parquet")

    def require(self, column: str, flag: str) -> None:
        """Raise ValueError, which names the columns found, if `column` is not one of them; `flag` asked for it."""
        if column not in self.columns:
            raise ValueError(
                f"expected a column {column!r} ({flag}) in {self.path}, found {', '.join(self.columns) or 'none'}; "
                f"name another with {flag}"
            )


def read_records(
    text: str, columns: Collection[str] | None = None, limit: int | None = None, *, default_file: str = "train.parquet"
) -> Records:
    """The rows that `path[@[a:b]]` names, or only the first `limit` of them, with these columns [all].

    Values are plain Python; an Arrow map becomes a dictionary. A path `owner/set[@revision][/file]` that does not exist
    on this machine is downloaded from the data sets of the Hugging Face hub; without a file it is `default_file`.
    Raises ValueError for an unknown kind of file, a broken file or line, or if there are no rows; FileNotFoundError if
    the file is neither here nor on the hub.
    """
    wanted = DataPath.parse(text)
    path = _local_file(wanted, default_file)
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"expected a file that ends in {', '.join(SUFFIXES)}, found {wanted.path}")
    read = _read_parquet if path.suffix == ".parquet" else _read_jsonl
    start, stop = _bounds(path, wanted.rows, limit)
    found, rows = read(path, start, stop, columns)
    if not rows:
        raise ValueError(f"{text} has no rows (the file has {_count_rows(path)}); give another file or slice")
    return Records(wanted.path, start, found, rows)


def stream_records(path: Path) -> Iterator[Row]:
    """All rows of a local file, one after the other, so that memory holds few of them; errors as in `read_records`."""
    if path.suffix == ".parquet":
        with _open_parquet(path) as file:
            before = 0
            try:
                for batch in _batches(file, 0, None, file.schema_arrow.names):
                    yield from _plain_rows(batch, path, before)
                    before += len(batch)
            except (pa.ArrowException, OSError) as error:
                raise _unreadable(path, error) from error
        return
    for number, line in _lines(path):
        yield _parse_line(line, path, number)


def _local_file(wanted: DataPath, default_file: str) -> Path:
    path = wanted.path
    if Path(path).is_file():
        return Path(path)
    if wanted.hub_file is None:
        raise FileNotFoundError(
            f"no file {path} here; expected a parquet or JSONL file, or owner/set[/file] of the hub"
        )
    repo, file, revision = wanted.hub_file
    return fetch(repo, file or default_file, revision)


def _bounds(path: Path, wanted: slice, limit: int | None) -> tuple[int, int | None]:
    """The first row and the one after the last (None: the end of the file), counted from the start of the file."""
    start, stop = wanted.start or 0, wanted.stop
    if start < 0 or (stop is not None and stop < 0):
        start, stop, _ = wanted.indices(_count_rows(path))
    if limit is not None:
        stop = start + limit if stop is None else min(stop, start + limit)
    return start, None if stop is None else max(start, stop)


def _count_rows(path: Path) -> int:
    if path.suffix != ".parquet":
        return sum(1 for _ in _lines(path))
    with _open_parquet(path) as file:
        return int(file.metadata.num_rows)


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _read_parquet(
    path: Path, start: int, stop: int | None, columns: Collection[str] | None
) -> tuple[list[str], list[Row]]:
    rows: list[Row] = []
    with _open_parquet(path) as file:
        found = file.schema_arrow.names
        wanted = found if columns is None else [name for name in found if name in columns]
        if twice := sorted({name for name in wanted if wanted.count(name) > 1}):
            raise ValueError(
                f"expected one column of each name in {path}, found {twice[0]!r} twice; rename one of them"
            )
        try:
            for batch in _batches(file, start, stop, wanted):
                rows += _plain_rows(batch.select(wanted), path, start + len(rows))
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, error) from error
    return found, rows


def _batches(file: pq.ParquetFile, start: int, stop: int | None, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The rows [start, stop) of a parquet file; other row groups are not read."""
    stop = file.metadata.num_rows if stop is None else stop
    before = 0
    for group in range(file.metadata.num_row_groups):
        size = file.metadata.row_group(group).num_rows
        if max(before, start) < min(before + size, stop):
            row = before
            for batch in file.iter_batches(min(BATCH_ROWS, stop - start), row_groups=[group], columns=columns):
                yield batch.slice(max(0, start - row), max(0, min(stop, row + len(batch)) - max(start, row)))
                row += len(batch)
                if row >= stop:
                    return
        before += size


def _plain_rows(batch: pa.RecordBatch, path: Path, first: int) -> list[Row]:
    try:
        rows: list[Row] = batch.to_pylist(maps_as_pydicts="strict")
    except (UnicodeDecodeError, KeyError):  # a text that is not UTF-8, a map with a key twice
        raise _unreadable_value(batch, path, first) from None
    return rows


def _unreadable_value(batch: pa.RecordBatch, path: Path, first: int) -> ValueError:
    for row in range(len(batch)):
        for name in batch.schema.names:
            try:
                batch.slice(row, 1).select([name]).to_pylist(maps_as_pydicts="strict")
            except (UnicodeDecodeError, KeyError) as error:
                return ValueError(
                    f"row {first + row} of {path}, column {name!r} cannot be read: {error}; write it anew"
                )
    raise AssertionError("a value of the batch cannot be read")


def _unreadable(path: Path, error: Exception) -> ValueError:
    reason = str(error).partition("\n")[0]
    if isinstance(error, PermissionError):
        return ValueError(f"expected a file that may be read, found {path} ({reason}); change its permissions")
    if isinstance(error, pa.ArrowNotImplementedError | MemoryError):
        return ValueError(
            f"{path} is a parquet file, but pyarrow cannot read it ({reason}); write it anew, more simply"
        )
    return ValueError(
        f"expected a parquet file, found none that can be read at {path} ({reason}); write or download it again"
    )


def _read_jsonl(
    path: Path, start: int, stop: int | None, columns: Collection[str] | None
) -> tuple[list[str], list[Row]]:
    rows: list[Row] = []
    found: dict[str, None] = {}
    for number, line in islice(_lines(path), start, stop):
        row = _parse_line(line, path, number)
        found.update(dict.fromkeys(row))
        rows.append(row if columns is None else {name: value for name, value in row.items() if name in columns})
    return list(found), rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1. Only `\\n` ends a line."""
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        # utf-8-sig: some editors begin a file with a byte order mark.
        with opened(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())
    except (UnicodeDecodeError, EOFError, OSError, zlib.error) as error:  # not UTF-8, cut short, not gzip, damaged
        raise ValueError(
            f"expected JSONL in UTF-8, found what cannot be read in {path} ({error}); write or download it again"
        ) from error


def _parse_line(line: str, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise ValueError(f"line {number} of {path} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object on line {number} of {path}, found {type(row).__name__}")
    return row
