"""The runs that the viewer shows: their metrics, what differs between their configurations, their trajectories."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
import yaml

from sleuth.metrics.jsonl import MetricsLine, read_metrics
from sleuth.metrics.trajectories import findings, headline, numbers, read_record, trainer_file
from sleuth.viewer.index import Query, TrajectoryFile, select, trajectory_files
from sleuth.viewer.pieces import load_tokenizer, token_texts

LIVE_SECONDS = 120.0
"""A run that wrote metrics so lately is shown as going on."""
PAGE = 50
ALL = "*"
"""In place of a file's name: all files of trajectories of a run."""
LOCAL_PORT = re.compile(r"(https?://(?:127\.0\.0\.1|localhost)):\d+")


@dataclass
class Run:
    """One run's folder. `name` is unlike that of any other run shown."""

    folder: Path
    name: str
    _files: dict[Path, TrajectoryFile] = field(default_factory=dict)
    _metrics: tuple[tuple[int, int], list[MetricsLine], str | None] = ((0, 0), [], None)

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """The resolved configuration; {} where there is none, or none that can be read."""
        try:
            found = yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.configuration, self.folder)

    def metrics(self) -> tuple[list[MetricsLine], str | None]:
        """The lines of metrics.jsonl (none where it is missing), and what is wrong with the file."""
        path = self.folder / "metrics.jsonl"
        try:
            found = path.stat()
            stamp = (found.st_mtime_ns, found.st_size)
            if stamp != self._metrics[0]:
                self._metrics = (stamp, read_metrics(path), None)
        except FileNotFoundError:
            return [], "no step was logged yet: there is no metrics.jsonl"
        except (OSError, ValueError) as error:
            return [], str(error)
        return self._metrics[1], self._metrics[2]

    def summary(self) -> dict[str, Any]:
        """What the list of runs shows."""
        lines, problem = self.metrics()
        last = lines[-1] if lines else {}
        return {
            "name": self.name,
            "folder": str(self.folder),
            "step": last.get("step"),
            "of": self.configuration.get("num_rollout"),
            "live": bool(lines) and time.time() - float(last.get("timestamp") or 0) < LIVE_SECONDS,
            "problem": problem,
        }

    def files(self) -> list[TrajectoryFile]:
        return trajectory_files(self.folder, self._files)

    def file(self, name: str) -> TrajectoryFile:
        """The file of trajectories of this name, as it is now; KeyError if the run has none."""
        file = next((file for file in self.files() if file.path.name == name), None)
        if file is None:
            raise KeyError(f"expected a file of trajectories of {self.name}, found {name!r}")
        file.refresh()
        return file

    def page(self, name: str, query: Query, offset: int) -> dict[str, Any]:
        """PAGE trajectories of a file (or of ALL) from the `offset`-th that fits; how many fit."""
        files = [self.file(one) for one in ([file.path.name for file in self.files()] if name == ALL else [name])]
        found = [(file, *fitting) for file in files for fitting in select(file, query)]
        rows = [
            {"file": file.path.name, "number": entry.number, "before": before, **entry.shown}
            for file, entry, before in found[offset : offset + PAGE]
        ]
        total, broken = sum(len(file.entries) for file in files), sum(file.broken for file in files)
        return {"total": len(found), "of": total, "broken": broken, "page": PAGE, "rows": rows}

    def trajectory(self, name: str, number: int) -> dict[str, Any]:
        """Everything about one trajectory; KeyError if there is none of that number."""
        file = self.file(name)
        if not 0 <= number < len(file.entries):
            raise KeyError(f"expected a trajectory below {len(file.entries)} in {name}, found {number}")
        entry = file.entries[number]
        record = read_record(next(file.lines([entry])).decode(errors="replace"), f"trajectory {number} of {name}", name)
        others = [{"number": other.number, **other.shown} for other in file.entries if other.group == entry.group]
        return {
            "headline": headline(record),
            "findings": findings(record),
            "numbers": numbers(record),
            "record": record,
            "group": others,
            "trainer": trainer_log_probs(file.path, number, len(record.get("response_ids") or [])),
            **self._pieces(record),
        }

    def _pieces(self, record: dict[str, Any]) -> dict[str, Any]:
        """`pieces`: for each segment the texts of its tokens; null where the tokenizer or the ids are not there."""
        ids = record.get("response_ids")
        if self.tokenizer is None or not ids:
            return {"pieces": None}
        pieces, start = [], 0
        for segment in record["segments"]:
            end = start + segment["tokens"]
            pieces.append(token_texts(ids[start:end], self.tokenizer))
            start = end
        return {"pieces": pieces}


def trainer_log_probs(path: Path, number: int, length: int) -> list[float | None] | None:
    """The trainer's log-probabilities of a logged trajectory's response tokens, before the step's updates.

    `sleuth.metrics.trajectories.write_trainer_log_probs` writes them. None where there are none, as for an evaluation,
    or where they are not of this trajectory.
    """
    try:
        found = orjson.loads(trainer_file(path).read_bytes())["log_probs"][number]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, list) and len(found) == length else None


def named_runs(folders: Sequence[Path]) -> list[Run]:
    """Runs by the shortest ends of their paths that tell them apart; the same folder twice is shown once."""
    whole = list(dict.fromkeys(folder.resolve() for folder in folders))
    for depth in range(1, max((len(path.parts) for path in whole), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in whole]
        if len(set(names)) == len(names):
            break
    return [Run(path, name) for path, name in zip(whole, names, strict=True)] if whole else []


def differing(configurations: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The settings that are not equal in all configurations, with the value of each (None where it is missing).

    Addresses on the machine itself that differ in the port alone are equal: servers of a run take any free port.
    """
    names = sorted({name for configuration in configurations for name in configuration})
    values = {name: [configuration.get(name) for configuration in configurations] for name in names}
    return {name: row for name, row in values.items() if any(_portless(value) != _portless(row[0]) for value in row)}


def _portless(value: Any) -> Any:
    """The value, with `http://127.0.0.1` for each address on this machine."""
    if isinstance(value, dict):
        return {key: _portless(inner) for key, inner in value.items()}
    return LOCAL_PORT.sub(r"\1", value) if isinstance(value, str) else value
