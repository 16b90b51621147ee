"""Reads rows from parquet and JSONL files: `path`, `path@[a:b]`, or a file of a Hugging Face data set.

Knows nothing of prompts or tokenizers.
"""

from __future__ import annotations

import gzip
import json
import logging
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

logger = logging.getLogger(__name__)

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_HUB_FILE = re.compile(r"^[\w.-]+/[\w.-]+/[^@]+$")


@dataclass(frozen=True, slots=True)
class DataPath:
    """A file and the rows wanted of it, as `parse("file.parquet@[0:100]")` gives them."""

    path: str
    rows: slice

    @classmethod
    def parse(cls, text: str) -> DataPath:
        """ValueError if there is an `@[` that is not a slice `@[a:b]`; either bound may be missing or negative."""
        match = _SLICE.match(text)
        if match is None:
            if "@[" in text:
                raise ValueError(f"expected path@[a:b] with whole numbers a and b, found {text!r}")
            return cls(text, slice(None))
        start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
        return cls(match["path"], slice(start, stop))


@dataclass(frozen=True, slots=True)
class Records:
    """Rows of a file: `rows[i]` is row `first + i` of the file; `columns` are the names found in it."""

    path: str
    first: int
    columns: list[str]
    rows: list[dict[str, Any]]

    def require(self, column: str, flag: str) -> None:
        """ValueError naming the columns found, if `column` is not one of them; `flag` says who asked for it."""
        if column not in self.columns:
            raise ValueError(
                f"expected a column {column!r} ({flag}) in {self.path}, found {', '.join(self.columns) or 'none'}; "
                f"name another with {flag}"
            )


def read_records(text: str, limit: int | None = None) -> Records:
    """The rows that `path[@[a:b]]` names, or only the first `limit` of them.

    Values are plain Python: numpy arrays and scalars become lists and numbers. A path `owner/repo/file` that is not
    here is fetched from the data sets of the Hugging Face hub. ValueError for an unknown kind of file, a
    broken file or line, or no rows at all; FileNotFoundError if the file is neither here nor there.
    """
    wanted = DataPath.parse(text)
    path = _local_file(wanted.path)
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"expected a file that ends in {', '.join(SUFFIXES)}, found {wanted.path}")
    read = _read_parquet if path.suffix == ".parquet" else _read_jsonl
    columns, rows, total = read(path, wanted.rows, limit)
    if not rows:
        raise ValueError(f"{text} has no rows (the file has {total}); give another file or slice")
    first, _, _ = wanted.rows.indices(total)
    return Records(wanted.path, first, columns, rows)


def _local_file(path: str) -> Path:
    if Path(path).is_file():
        return Path(path)
    if Path(path).is_absolute() or path.startswith(".") or not _HUB_FILE.match(path):
        raise FileNotFoundError(f"no file {path} here; expected a parquet or JSONL file, or owner/repo/file of the hub")
    from huggingface_hub import hf_hub_download

    owner, repo, file = path.split("/", 2)
    try:
        return Path(hf_hub_download(f"{owner}/{repo}", file, repo_type="dataset"))
    except Exception as error:
        raise FileNotFoundError(
            f"no file {path} here, and the Hugging Face hub did not give {file} of the data set {owner}/{repo}: {error}"
        ) from error


def _read_parquet(path: Path, wanted: slice, limit: int | None) -> tuple[list[str], list[dict[str, Any]], int]:
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"expected a parquet file, found none that can be read at {path} ({reason}); write or download it again"
        ) from error
    start, stop, _ = wanted.indices(table.num_rows)
    rows = table.slice(start, max(0, stop - start))[:limit].to_pylist()
    return table.column_names, [plain(row) for row in rows], table.num_rows


def _read_jsonl(path: Path, wanted: slice, limit: int | None) -> tuple[list[str], list[dict[str, Any]], int]:
    rows = []
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig") as file:  # some editors begin a file with a byte order mark
            for number, line in enumerate(file, start=1):
                if line.strip():
                    rows.append(_parse_line(line, path, number))
    except (UnicodeDecodeError, EOFError, OSError, zlib.error) as error:  # not UTF-8, cut short, not gzip, damaged
        raise ValueError(
            f"expected JSONL in UTF-8, found what cannot be read in {path} ({error}); write or download it again"
        ) from error
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return columns, rows[wanted][:limit], len(rows)


def _parse_line(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} of {path} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object on line {number} of {path}, found {type(row).__name__}")
    return row


def plain(value: Any) -> Any:
    """`value` with numpy arrays and scalars inside it as Python lists and numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value
