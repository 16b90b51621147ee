"""`metrics.jsonl`: one JSON object for each step, readable while the run goes on and after it was killed.

A line is `{"step": 3, "timestamp": 1712.5, "reward/mean": 0.4, ...}`: step 0 is the evaluation before
training, training steps count from 1, the timestamp is in unix seconds. The file never holds a step
twice, and its steps rise. NaN and infinities, which JSON lacks, are written as null.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MetricsLine = dict[str, Any]


def read_metrics(path: str | Path) -> list[MetricsLine]:
    """The lines of a metrics file, in order; a last line that a kill left incomplete is skipped.

    Raises ValueError naming the line when any other line is not a JSON object with a step.
    """
    lines: list[MetricsLine] = []
    texts = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    for number, text in enumerate(texts, start=1):
        if not text:
            continue
        line = _parse(text)
        if line is not None:
            lines.append(line)
        elif number == len(texts):
            logger.warning("%s: left out the last line, which is incomplete", path)
        else:
            raise ValueError(
                f"{path}, line {number}: expected a JSON object with an integer step, "
                f"found {text[:80]!r}; remove the line"
            )
    return lines


def _parse(text: str) -> MetricsLine | None:
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


class MetricsFile:
    """Appends steps to a metrics file.

    Opening it repairs an incomplete last line and removes the steps from `first_step` on, because a
    resumed run does them again; what is removed is kept in `<name>.cut.jsonl` beside it.
    """

    def __init__(self, path: Path, *, first_step: int = 1) -> None:
        self._path = path
        self._last: MetricsLine | None = None
        self._last_offset = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._cut(first_step)
        self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 (closed by close())
        self._file.seek(0, os.SEEK_END)

    def _cut(self, first_step: int) -> None:
        lines = read_metrics(self._path)
        kept = [line for line in lines if line["step"] < first_step]
        removed = lines[len(kept) :]
        if removed:
            aside = self._path.with_suffix(".cut.jsonl")
            with open(aside, "ab") as file:
                file.write(b"".join(map(_encode, removed)))
            logger.info("moved %d steps from step %d on from %s to %s", len(removed), first_step, self._path, aside)
        encoded = [_encode(line) for line in kept]
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_bytes(b"".join(encoded))
        temporary.replace(self._path)
        if kept:
            self._last, self._last_offset = kept[-1], sum(map(len, encoded[:-1]))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a step; a second write of the last step is merged into its line."""
        if self._last is not None and step < self._last["step"]:
            raise ValueError(
                f"expected step {self._last['step']} or later, found step {step}; "
                "log a step's metrics before the next step's, or open the file anew with first_step"
            )
        if self._last is None or step > self._last["step"]:
            self._last, self._last_offset = {"step": step}, self._file.tell()
        self._last |= {"timestamp": round(time.time(), 3)} | {name: finite(value) for name, value in metrics.items()}
        self._file.seek(self._last_offset)
        self._file.write(_encode(self._last))
        self._file.truncate()
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def finite(value: Any) -> float | int | None:
    """A value as JSON can hold it, from a number, tensor or numpy scalar; None for NaN and infinities."""
    if isinstance(value, bool | int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _encode(line: MetricsLine) -> bytes:
    return (json.dumps(line, allow_nan=False) + "\n").encode()
