"""What the viewer knows of a run's logged trajectories without reading them whole: a line each, filtered and paged.

A file of trajectories is read once, and again when it has changed. Of a record only what the list shows is kept, with
its place in the file; the numbers of its tokens, most of its bytes, are not even parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from sleuth.metrics.trajectories import misshapen

SHOWN_CHARACTERS = 160
"""Of the prompt's end, in the list."""
FIRST_NUMBERS = b', "prompt_ids": ['
"""Where a record's token ids begin: quotes within texts are escaped, so its last occurrence is never text."""
FILE_NAME = re.compile(r"(?:step|eval)_(\d+)(?:_(.+))?\.jsonl")


@dataclass(frozen=True, slots=True)
class Entry:
    """A trajectory in the list. `number` counts a file's trajectories from 0; `place` is (offset, length) in bytes."""

    number: int
    place: tuple[int, int]
    group: int | None
    question: tuple[Any, Any]
    """What the prompt is known by in other files: data file and row."""
    shown: dict[str, Any]


@dataclass(slots=True)
class TrajectoryFile:
    """One file of trajectories: `step` and, of an evaluation, its `name`; `broken` counts lines that are no record."""

    path: Path
    step: int
    name: str
    stamp: tuple[int, int] = (0, 0)
    entries: list[Entry] = field(default_factory=list)
    broken: int = 0

    def refresh(self) -> None:
        """Read the file if it is not as it was."""
        found = self.path.stat()
        stamp = (found.st_mtime_ns, found.st_size)
        if stamp != self.stamp:
            self.entries, self.broken = read_entries(self.path)
            self.stamp = stamp

    def lines(self, entries: list[Entry]) -> Iterator[bytes]:
        """The bytes of these trajectories, one after the other."""
        with self.path.open("rb") as file:
            for entry in entries:
                file.seek(entry.place[0])
                yield file.read(entry.place[1])


def read_entries(path: Path) -> tuple[list[Entry], int]:
    """The entries of a file, and how many lines of it are no trajectories (a last one that a kill cut short)."""
    entries: list[Entry] = []
    offset = broken = 0
    with path.open("rb") as file:
        for line in file:
            record = parse_head(line) if line.endswith(b"}\n") else None
            if record is None:
                broken += bool(line.strip())
            else:
                where = (record.get("file"), record.get("row") if record.get("file") else record.get("group_index"))
                entries.append(
                    Entry(len(entries), (offset, len(line)), record.get("group_index"), where, _shown(record))
                )
            offset += len(line)
    return entries, broken


def parse_head(line: bytes) -> dict[str, Any] | None:
    """A record without the numbers of its tokens; None for what is no record."""
    end = line.rfind(FIRST_NUMBERS)
    try:
        record = orjson.loads(line[:end] + b"}" if end > 0 else line)
    except orjson.JSONDecodeError:
        return None
    whole = isinstance(record, dict) and "segments" in record and misshapen(record) is None
    return record if whole else None


def _shown(record: dict[str, Any]) -> dict[str, Any]:
    components, counts = record.get("reward_components") or {}, record.get("rollout_metrics") or {}
    notes = record.get("notes") or {}
    prompt = str(record.get("prompt") or "")
    return {
        "index": record.get("index"),
        "group": record.get("group_index"),
        "reward": record.get("reward"),
        "right": _is_one(components.get("exact_match")),
        "valid": _is_one(components.get("valid_format")),
        "searches": counts.get("searches"),
        "tokens": sum(segment["tokens"] for segment in record["segments"]),
        "status": record.get("status"),
        "stop_reason": record.get("stop_reason"),
        "answer": None if notes.get("answer") is None else str(notes["answer"])[:SHOWN_CHARACTERS],
        "question": _question(prompt),
    }


def _is_one(value: Any) -> bool | None:
    return None if value is None else value == 1


def _question(prompt: str) -> str:
    """The end of what the user said, where questions stand."""
    said = re.split(r"<\|im_end\|>|<\|eot_id\|>|\n(?:Assistant|assistant):?", prompt)
    texts = [text for text in said if text.strip(" \n") and not re.fullmatch(r"\s*<\|im_start\|>assistant\s*", text)]
    text = " ".join((texts[-1] if texts else prompt).split())
    return text if len(text) <= SHOWN_CHARACTERS else "..." + text[-SHOWN_CHARACTERS:]


FILTERS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "all": lambda shown: True,
    "right": lambda shown: shown["right"] is True,
    "wrong": lambda shown: shown["right"] is False,
    "invalid": lambda shown: shown["valid"] is False,
    "no search": lambda shown: shown["searches"] == 0,
}


@dataclass(frozen=True, slots=True)
class Query:
    """What the list is to show. `compare`: the name of an earlier file of the same questions; then only those stay
    whose answer was right in one and wrong in the other."""

    filter: str = "all"
    text: str = ""
    group: int | None = None
    compare: TrajectoryFile | None = None


def select(file: TrajectoryFile, query: Query) -> list[tuple[Entry, bool | None]]:
    """The entries of a file that fit, each with whether its question was right in the file that it is compared with.

    ValueError for a filter that does not exist.
    """
    if query.filter not in FILTERS:
        raise ValueError(f"expected one of {', '.join(FILTERS)} as filter, found {query.filter!r}")
    fits = FILTERS[query.filter]
    chosen = [entry for entry in file.entries if fits(entry.shown) and query.group in (None, entry.group)]
    before: dict[int, bool | None] = {}
    if query.compare is not None:
        before = _earlier(file, query.compare)
        chosen = [entry for entry in chosen if {before.get(entry.number), entry.shown["right"]} == {True, False}]
    if query.text:
        wanted = query.text.casefold()
        found = zip(chosen, file.lines(chosen), strict=True)
        chosen = [entry for entry, line in found if wanted in _text_of(line).casefold()]
    return [(entry, before.get(entry.number)) for entry in chosen]


def _earlier(file: TrajectoryFile, before: TrajectoryFile) -> dict[int, bool | None]:
    """For each trajectory of `file`, by number, whether that of the same question (and sample) was right `before`."""
    known = dict(zip(_keys(before), (entry.shown["right"] for entry in before.entries), strict=True))
    return {entry.number: known.get(key) for entry, key in zip(file.entries, _keys(file), strict=True)}


def _keys(file: TrajectoryFile) -> list[tuple[Any, ...]]:
    """For each trajectory its question, and which of the logged samples of that question it is, by their indices."""
    indices: dict[tuple[Any, Any], list[Any]] = {}
    for entry in file.entries:
        indices.setdefault(entry.question, []).append(entry.shown["index"])
    places = {
        question: {index: place for place, index in enumerate(sorted(of, key=_none_first))}
        for question, of in indices.items()
    }
    return [(*entry.question, places[entry.question][entry.shown["index"]]) for entry in file.entries]


def _none_first(index: int | None) -> tuple[bool, int]:
    return index is not None, index or 0


def _text_of(line: bytes) -> str:
    record = parse_head(line) or {"segments": []}
    texts = [record.get("prompt"), *(segment.get("text") for segment in record["segments"]), record.get("error")]
    notes = (record.get("notes") or {}).values()
    return "\n".join(str(text) for text in (*texts, *notes) if text)


def trajectory_files(run_dir: Path, known: dict[Path, TrajectoryFile]) -> list[TrajectoryFile]:
    """The files of a run, by step, training before evaluations; those in `known` are taken from there."""
    found = []
    for path in (run_dir / "trajectories").glob("*.jsonl"):
        if match := FILE_NAME.fullmatch(path.name):
            found.append(known.setdefault(path, TrajectoryFile(path, int(match[1]), match[2] or "")))
    return sorted(found, key=lambda file: (file.step, file.name))
