"""The file of an evaluation's answers: a trajectory a line, as in a run's trajectories/, written as each one finishes.

    answers.jsonl     one line for each trajectory, failed ones included
    answers.json      what the answers depend on and, once all are there, the numbers

An evaluation that was interrupted goes on: what is in the file is taken, what a kill tore is cut off. A file of other
settings is refused.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import PreTrainedTokenizerBase

from sleuth.arguments.table import flattened
from sleuth.metrics.trajectories import read_record, trajectory_record
from sleuth.rollout.hook_runner import UNUSABLE
from sleuth.sample import Sample, SampleStatus, Segment, TokenTrace, check_reason
from sleuth.secrets import without_known

FORMAT = 1
SHOWN_DIFFERENCES = 5

Place = tuple[str, float, int, int]
"""Evaluation set, temperature, number of the question, number of the sample."""


def settings_file(answers: Path) -> Path:
    return answers.with_suffix(".json")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A file of answers that was read: what they depend on, its numbers, and the trajectories."""

    path: Path
    settings: dict[str, Any]
    results: dict[str, Any]
    """Empty while answers are missing."""
    records: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Evaluation:
        """ValueError, or OSError, for a file that tools/eval.py did not write."""
        described = read_settings(path)
        return cls(path, described["settings"], described.get("results", {}), read_answers(path))


def read_settings(path: Path) -> dict[str, Any]:
    """What stands beside a file of answers; ValueError if there is nothing, or something else."""
    beside = settings_file(path)
    try:
        described = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no JSON: {error}"
        raise ValueError(
            f"expected answers of tools/eval.py, which has its settings in {beside}, found none there ({reason}); name "
            "another file"
        ) from None
    if not isinstance(described, dict) or described.get("format") != FORMAT or not _is_whole(described):
        raise ValueError(f"expected the settings of tools/eval.py in {beside}, found another file; name another")
    return described


def _is_whole(described: Mapping[str, Any]) -> bool:
    return all(isinstance(found, dict) for found in (described.get("settings"), described.get("results", {})))


def read_answers(path: Path) -> list[dict[str, Any]]:
    """The trajectories of a file of answers, without a last line that a kill tore. ValueError for any other line."""
    records = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            record = read_record(line.decode(errors="replace"), f"line {number} of {path}", path.name)
            try:
                sample_of(record)
                str(record["set"]), float(record["temperature"])
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise ValueError(
                    f"expected an answer of tools/eval.py in line {number} of {path}, found a record of another shape "
                    f"({type(error).__name__}: {error}); remove the line, or name another file"
                ) from None
            records.append(record)
    return records


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two settings, as `sampling.top_p: 1.0, now 0.9`."""
    old, new = dict(flattened(before)), dict(flattened(now))
    return [
        f"{name}: {old.get(name, '-')}, now {new.get(name, '-')}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]


class AnswerFile:
    """Opened for one evaluation at a time; see the module."""

    def __init__(
        self, path: Path, settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, samples: int = 1
    ) -> None:
        """`samples`: how many each question has. ValueError if the file is another evaluation's, or in use."""
        self.path, self.settings, self.samples = path, json.loads(json.dumps(settings)), samples
        self._tokenizer = tokenizer
        self._found: dict[Place, dict[str, Any]] = {}
        self.finished = 0
        """How many answers the file has."""
        self.failed: list[tuple[str, float, Sample]] = []
        """Set, temperature and sample of each trajectory that failed and was generated anew."""
        self.on_record: Callable[[], None] = lambda: None
        if path.is_file() and whole_length(path):
            self._check_settings()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        except OSError as error:
            raise ValueError(
                f"--output: expected a file that can be written, found {path} ({error}); name another"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ValueError(f"--output {path} is in use by another evaluation; wait for it, or name another") from None
        self._read()
        if not self.finished or not settings_file(path).exists():
            self._write_settings({})

    def has_all(self, sets: Mapping[str, int], temperatures: list[float]) -> bool:
        """Whether no answer is missing; `sets`: how many questions each has."""
        wanted = (
            (name, temperature, question, sample)
            for name, questions in sets.items()
            for temperature in temperatures
            for question in range(questions)
            for sample in range(self.samples)
        )
        return all(place in self._found for place in wanted)

    def of(self, name: str, temperature: float) -> SetAnswers:
        """The answers of one set at one temperature, for the generation loop."""
        return SetAnswers(self, name, temperature)

    def take(self, name: str, temperature: float, new: Sample) -> Sample | None:
        record = self._found.get((name, temperature, new.group_index, new.index % self.samples))
        if record is None or record["prompt_ids"] != new.trace.prompt_ids:
            return None
        found = sample_of(record)
        found.prompt, found.label, found.metadata = new.prompt, new.label, new.metadata
        return found

    def add(self, name: str, temperature: float, sample: Sample) -> None:
        """Write a trajectory; OSError if the disk is full."""
        record = {"set": name, "temperature": temperature}
        record |= trajectory_record(sample, self._tokenizer, evaluation=True)
        line = without_known(json.dumps(record, ensure_ascii=False, allow_nan=False)) + "\n"
        self._file.write(line.encode("utf-8", errors="replace"))
        self._file.flush()
        self.finished += sample.status not in UNUSABLE
        self.on_record()

    def finish(self, results: Mapping[str, Any]) -> None:
        """Write the numbers beside the answers."""
        self._write_settings(results)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_settings(self) -> None:
        changed = differences(read_settings(self.path)["settings"], self.settings)
        if changed:
            more = f" and {len(changed) - SHOWN_DIFFERENCES} more" if len(changed) > SHOWN_DIFFERENCES else ""
            raise ValueError(
                f"--output: expected a new file, or one of the same evaluation to go on with, found {self.path} of "
                f"another one ({'; '.join(changed[:SHOWN_DIFFERENCES])}{more}); name another file"
            )

    def _read(self) -> None:
        """Take what is in the file, without a last line that a kill tore."""
        whole = whole_length(self.path)
        if whole < self.path.stat().st_size:
            os.truncate(self.path, whole)
        for record in read_answers(self.path):
            if record["status"] in UNUSABLE:
                self.failed.append((record["set"], record["temperature"], sample_of(record)))
                continue
            place = (record["set"], record["temperature"], record["group_index"], record["index"] % self.samples)
            self._found[place] = record
        self.finished = len(self._found)

    def _write_settings(self, results: Mapping[str, Any]) -> None:
        described = {"format": FORMAT, "settings": self.settings} | ({"results": results} if results else {})
        text = without_known(json.dumps(described, indent=1, ensure_ascii=False, allow_nan=False))
        target = settings_file(self.path)
        temporary = target.with_name(f"{target.name}.tmp")
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(target)


class SetAnswers:
    """The part of an AnswerFile that belongs to one set and temperature (`sleuth.rollout.loop.FinishedSamples`)."""

    def __init__(self, file: AnswerFile, name: str, temperature: float) -> None:
        self._file, self._name, self._temperature = file, name, temperature

    def take(self, new: Sample) -> Sample | None:
        return self._file.take(self._name, self._temperature, new)

    async def record(self, sample: Sample, entry: bytes | None = None) -> None:
        self._file.add(self._name, self._temperature, sample)

    def failed(self, sample: Sample) -> None:
        self._file.failed.append((self._name, self._temperature, sample))
        self._file.add(self._name, self._temperature, sample)


def whole_length(path: Path) -> int:
    """The bytes of a file up to the end of its last whole line."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for end in _backwards(size):
            start = max(0, end - 65_536)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
    return 0


def _backwards(size: int) -> Iterator[int]:
    yield from range(size, 0, -65_536)


def sample_of(record: Mapping[str, Any]) -> Sample:
    """The sample that a line holds, with the text of its prompt and the label as they were logged."""
    segments, start = [], 0
    for segment in record["segments"]:
        segments.append(Segment(segment["source"], start, start + segment["tokens"]))
        start += segment["tokens"]
    source = record.get("data_source")
    return Sample(
        index=record["index"],
        group_index=record["group_index"],
        prompt=record["prompt"],
        trace=TokenTrace(
            record["prompt_ids"], record["response_ids"], record["loss_mask"], record["log_probs"], segments
        ),
        label=record["label"],
        metadata={} if source is None else {"data_source": source},
        status=SampleStatus(record["status"]),
        stop_reason=None if record["stop_reason"] is None else check_reason(record["stop_reason"]),
        reward=record["reward"],
        reward_components={name: value for name, value in record["reward_components"].items() if value is not None},
        rollout_metrics={name: value for name, value in record["rollout_metrics"].items() if value is not None},
        notes=dict(record["notes"]),
        weight_version=record.get("weight_version"),
        error=record["error"],
        file=record["file"],
        row=record["row"],
    )
