"""Rows in the shape of Search-R1's public set: made, checked, counted, and written to parquet as they come."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sleuth.prompt_templates import PromptTemplate

NAMED = 5
"""Rows of each kind that the report names."""
GROUP_ROWS = 10_000
"""Rows that are in memory before they are written, as one row group."""
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("question", pa.string()),
        ("golden_answers", pa.list_(pa.string())),
        ("data_source", pa.string()),
        ("prompt", pa.list_(_MESSAGE)),
        ("ability", pa.string()),
        (
            "reward_model",
            pa.struct([("ground_truth", pa.struct([("target", pa.list_(pa.string()))])), ("style", pa.string())]),
        ),
        ("extra_info", pa.struct([("index", pa.int64()), ("split", pa.string())])),
    ]
)


@dataclass(slots=True)
class Counts:
    """How many rows a file has, and how many of them have something about them, with the first of these."""

    rows: int = 0
    numbers: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    first: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def note(self, what: str, row: int) -> None:
        self.numbers[what] += 1
        if len(self.first[what]) < NAMED:
            self.first[what].append(row)

    def clear(self) -> None:
        self.rows = 0
        self.numbers.clear()
        self.first.clear()

    def sentences(self) -> Iterator[str]:
        """Such as `12 without an answer (rows 3, 8, 9, 12, 40, ...)`."""
        for what, count in self.numbers.items():
            rows = ", ".join(map(str, self.first[what])) + (", ..." if count > NAMED else "")
            yield f"{count:,} {what} (row{'s' if count > 1 else ''} {rows})"


def question_key(question: str) -> int:
    """A number that two questions share if they differ only in case, spaces and marks at the end."""
    text = " ".join(question.casefold().split()).rstrip("?!.。？！ ")
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest())


def make_row(
    row: dict[str, Any],
    question: str,
    answers: list[str],
    source: str,
    split: str,
    index: int,
    template: PromptTemplate,
) -> dict[str, Any]:
    """A row of Search-R1's shape; the id is the row's own, where it has one."""
    prompt = template.fill(question)
    own_id = row.get("id")
    return {
        "id": f"{split}_{index}" if own_id is None or own_id == "" else str(own_id),
        "question": question,
        "golden_answers": answers,
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": answers}, "style": "rule"},
        "extra_info": {"index": index, "split": split},
    }


class RowWriter:
    """Writes rows to a parquet file, which takes its name only when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(path.name + ".tmp")
        self._writer = pq.ParquetWriter(self._temporary, SCHEMA)
        self._rows: list[dict[str, Any]] = []
        self.count = 0

    def write(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self.count += 1
        if len(self._rows) == GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, SCHEMA))
            self._rows.clear()

    def finish(self) -> None:
        self._flush()
        self._writer.close()
        self._temporary.replace(self._path)

    def abandon(self) -> None:
        self._writer.close()
        self._temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[RowWriter]:
    """A writer; the file at `path` is replaced at the end of the block, and left as it was if the block fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = RowWriter(path)
    except OSError as error:
        raise ValueError(
            f"--local_dir: expected a folder that can be written, found {path.parent} ({error}); name another"
        ) from None
    try:
        yield writer
        writer.finish()
    except BaseException:
        writer.abandon()
        raise
