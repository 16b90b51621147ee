"""Reads rows of CSV, TSV, JSONL and parquet files, one after the other, so that memory holds few of them."""

from __future__ import annotations

import codecs
import csv
import gzip
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sleuth.data.records import stream_records
from sleuth.data_path import SUFFIXES
from sleuth.labels import parse_golden_answers

TABLES = {".csv": ",", ".tsv": "\t"}
ALL = (*SUFFIXES, *TABLES, ".csv.gz", ".tsv.gz")


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns hold question and answers, and what stands between several answers in a text (None: nothing)."""

    question: str = "question"
    answers: str = "golden_answers"
    separator: str | None = None

    def question_in(self, row: dict[str, Any]) -> str:
        """The question, "" where there is none."""
        value = row.get(self.question)
        return " ".join(str(value).split()) if value is not None and value == value else ""  # only NaN is not itself

    def answers_in(self, row: dict[str, Any]) -> list[str]:
        """The accepted answers, each once; [] where there is none. ValueError for a value of another type."""
        value = row.get(self.answers)
        if isinstance(value, str) and self.separator is not None:
            value = [part.strip() for part in value.split(self.separator)]
        return [answer.strip() for answer in parse_golden_answers(value)]


def read_rows(path: Path, columns: Columns, encoding: str = "utf-8") -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row with its number, from 0, as `path@[a:b]` counts.

    ValueError if the file is of no known kind, is damaged, lacks a column, or has no rows.
    """
    if not path.name.endswith(ALL):
        raise ValueError(f"expected a file that ends in {', '.join(ALL)}, found {path}; rename it, or convert it")
    if not path.is_file():
        raise ValueError(f"expected a file at {path}, found none; correct the path")
    plain = path.name.removesuffix(".gz")
    delimiter = TABLES.get(Path(plain).suffix)
    rows = _read_table(path, delimiter, encoding) if delimiter else stream_records(path)
    number = -1
    seen: dict[str, None] = {}
    for number, row in enumerate(rows):
        if number == 0 or (number < 1000 and not {columns.question, columns.answers} <= seen.keys()):
            seen.update(dict.fromkeys(row))
            if delimiter or path.suffix == ".parquet":
                _require(columns, seen, path)
        yield number, row
    if number < 0:
        raise ValueError(f"{path} has no rows; give another file")
    _require(columns, seen, path)


def _require(columns: Columns, seen: dict[str, None], path: Path) -> None:
    for column, flag in ((columns.question, "--question-column"), (columns.answers, "--answers-column")):
        if column not in seen:
            raise ValueError(
                f"expected a column {column!r} ({flag}) in {path}, found {', '.join(map(str, seen))}; name another "
                f"with {flag}"
            )


def _read_table(path: Path, delimiter: str, encoding: str) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(sys.maxsize)
    opened = gzip.open if path.suffix == ".gz" else open
    encoding = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    try:
        with opened(path, "rt", encoding=encoding, newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            if twice := sorted({name for name in reader.fieldnames or [] if (reader.fieldnames or []).count(name) > 1}):
                raise ValueError(f"expected one column of each name in {path}, found {twice[0]!r} twice; rename one")
            for row in reader:
                if None in row:
                    raise ValueError(
                        f"line {reader.line_num} of {path} has {len(row) - 1 + len(row[None])} fields, expected the "
                        f"{len(reader.fieldnames or [])} of the first; put a field that holds {delimiter!r} in quotes"
                    )
                yield row
    except UnicodeDecodeError as error:
        raise ValueError(
            f"expected {path} in {encoding.removesuffix('-sig')}, found the byte 0x{error.object[error.start]:02x} in "
            f"{error.object[max(0, error.start - 20) : error.end + 20]!r}; {_other_encoding(path, encoding)}"
        ) from error
    except LookupError:
        raise ValueError(
            f"--encoding: expected a name such as utf-8 or cp1252, found {encoding!r}; correct it"
        ) from None
    except (csv.Error, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} cannot be read as a table ({error}); look for a quote that is not closed") from error


def _other_encoding(path: Path, encoding: str) -> str:
    """What to do about a file that is in another encoding than this one."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        start = file.read(2)
    if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "it begins as UTF-16 does (Unicode text of Excel): add --encoding utf-16, or save it as UTF-8"
    if encoding == "utf-8-sig":
        return "add --encoding cp1252 if it comes from Excel on Windows, or save it as UTF-8"
    return "name its encoding with --encoding, or save it as UTF-8 and leave the flag out"
