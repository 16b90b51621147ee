"""Reading a corpus: one JSON object a line, `{"id", "contents"}`, where contents is `"Title"\\ntext`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_corpus(path: Path | str) -> list[dict[str, Any]]:
    """All passages of a `.jsonl` or `.jsonl.gz` file, in order.

    A passage needs a string `contents`, or `text` with an optional `title`, of which contents are made.
    Raises ValueError naming the line that is not such an object, or if there is none at all.
    """
    passages = [_passage(line, number, path) for number, line in _lines(Path(path))]
    if not passages:
        raise ValueError(f'{path} holds no passage; expected one JSON object a line, {{"id": ..., "contents": ...}}')
    return passages


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    if not path.is_file():
        raise ValueError(f"no corpus at {path}; give --corpus_path a .jsonl or .jsonl.gz file")
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def _passage(line: bytes, number: int, path: Path | str) -> dict[str, Any]:
    try:
        passage = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: expected JSON, found {line[:80]!r} ({error})") from None
    if isinstance(passage, dict):
        if isinstance(passage.get("contents"), str):
            return passage
        if isinstance(passage.get("text"), str):
            return {**passage, "contents": f'"{passage.get("title") or ""}"\n{passage["text"]}'}
    raise ValueError(f"{path}, line {number}: expected an object with 'contents', found {line[:80]!r}")
