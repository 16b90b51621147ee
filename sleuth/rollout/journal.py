"""The journal: finished, scored samples of each step on disk, so that a resumed run takes them instead of new ones.

    <save>/journal/step_0000007.jsonl.gz

A file is a chain of gzip members, each with one line of JSON and gzip's own checksum; `zcat` prints it. The first line
says which settings the samples belong to; then follows a line for each sample as it finishes, and at the end one with
the groups that were kept. A kill can tear only the last member. Reading stops there, and the next run cuts it off.

The trainer is deterministic: from a checkpoint, the same samples lead to the same weights. So the samples of all steps
since the checkpoint are still those of the policy that is being trained, and none has to be generated again.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sleuth.checkpoints import JOURNAL, TRACKER, checkpoint_steps, is_checkpoint
from sleuth.sample import Sample, SampleStatus, Segment, TokenTrace, check_reason

logger = logging.getLogger(__name__)

FORMAT = 1
GZIP_MEMBER = 31
"""zlib's `wbits` for data with gzip's header and checksum."""
PIECE = 1 << 16
"""Bytes that are read at once: what follows a member is copied at most in such pieces."""

Key = tuple[int, int]
"""A sample's place in its step: `group_index`, `index`."""


@dataclass(slots=True)
class StepRecord:
    """What a file of the journal holds: its settings, samples by their place, and what its last line says.

    That line is there if the step was finished: the groups that were kept, and the rollout's state after the step.
    """

    settings: dict[str, Any]
    samples: dict[Key, Sample] = field(default_factory=dict)
    kept: list[int] | None = None
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def groups(self) -> list[list[Sample]]:
        """The kept groups in order; empty if the step was not finished."""
        members: dict[int, list[Sample]] = {}
        for (group, _), sample in sorted(self.samples.items()):
            members.setdefault(group, []).append(sample)
        return [members[group] for group in self.kept or []]


class Journal:
    """The journal of a run: written under `folder` (that of --save), read from `source` (that of --load)."""

    def __init__(
        self, folder: Path, source: Path | None, settings: Mapping[str, Any], *, keep_all: bool = False
    ) -> None:
        """`settings` decide which samples belong to a run; they must be what JSON can hold.

        Files go when the checkpoints before them have gone; `keep_all` keeps them.
        """
        self.folder, self.settings = folder / JOURNAL, dict(settings)
        self._checkpoints, self._keep_all = folder, keep_all
        self._source = None if source is None else journal_of(source)

    def start(self, *, again: bool = False) -> None:
        """Begin a run. A new one (nothing to resume) clears what an earlier run left in its folder.

        `again`: in the middle of a run, whose samples so far are then found.
        """
        if again:
            self._source = self.folder
        elif self._source is None:
            for path in step_files(self.folder).values():
                path.unlink()

    def step(self, step: int) -> StepJournal:
        """The journal of `step`, with the samples that an interrupted run finished. Deletes files no longer needed."""
        try:
            self._prune()
        except OSError as error:
            logger.warning("old files of the journal in %s cannot be deleted: %s", self.folder, error)
        return StepJournal(step_file(self.folder, step), step, self._found(step), self.settings)

    def _found(self, step: int) -> dict[Key, Sample]:
        if self._source is None:
            return {}
        record = read_step(step_file(self._source, step))
        if record is None:
            return {}
        if changed := differing(record.settings, self.settings):
            logger.warning(
                "step %d: the journal in %s has samples of a run with other settings (%s); they are generated anew",
                *(step, self._source, ", ".join(changed)),
            )
            return {}
        return record.samples

    def _prune(self) -> None:
        """Delete the files of steps up to the oldest checkpoint: no checkpoint is left that could go on with them.

        Without a tracker a run starts at step 1, even if a kill left a checkpoint that the tracker was to name next.
        """
        if self._keep_all or not (self._checkpoints / TRACKER).is_file():
            return
        oldest = min(checkpoint_steps(self._checkpoints), default=0)
        for step, path in step_files(self.folder).items():
            if step <= oldest:
                path.unlink()


class StepJournal:
    """Gives the samples of a step that are there already, and writes the others as they finish."""

    def __init__(self, path: Path, step: int, found: dict[Key, Sample], settings: Mapping[str, Any]) -> None:
        self.path = path
        self.taken = 0
        """Samples of this step that were found, and so not generated."""
        self._found = found
        self._lock = threading.Lock()
        self._ended = False
        header = {"format": FORMAT, "step": step, "settings": settings}
        self._write(lambda: _rewrite(path, [header, *map(sample_record, found.values())]))

    def take(self, new: Sample) -> Sample | None:
        """The finished sample in the place of `new`, whose prompt it must have; None if it has to be generated."""
        found = self._found.pop((new.group_index, new.index), None)
        if found is None or found.trace.prompt_ids != new.trace.prompt_ids:
            return None
        self.taken += 1
        found.prompt, found.label, found.metadata = new.prompt, new.label, new.metadata
        return found

    async def record(self, sample: Sample, entry: bytes | None = None) -> None:
        """Write a finished and scored sample; `entry` is its `journal_entry`, where somebody has made it."""
        await asyncio.to_thread(lambda: self._append(entry or journal_entry(sample)))

    def finish(self, groups: Sequence[Sequence[Sample]], state: Mapping[str, Any]) -> None:
        """Write that the step is whole, which groups were kept, and the rollout's state (a checkpoint's, as JSON)."""
        self._append(_member({"kept": [group[0].group_index for group in groups], "state": state}))

    def _append(self, member: bytes) -> None:
        def append() -> None:
            with self._lock, self.path.open("ab") as file:
                file.write(member)

        self._write(append)

    def _write(self, action: Callable[[], None]) -> None:
        """Do it, unless an earlier write failed. A journal saves work; that it cannot be written must end no run."""
        if self._ended:
            return
        try:
            action()
        except OSError as error:
            self._ended = True
            logger.warning("the journal %s cannot be written (%s); the run goes on without it", self.path, error)


def journal_entry(sample: Sample) -> bytes:
    """What a journal's file holds of a finished sample."""
    return _member(sample_record(sample))


def journal_of(load: Path) -> Path:
    """The journal that belongs to a folder of checkpoints, or to one checkpoint."""
    return (load.parent if is_checkpoint(load) else load) / JOURNAL


def step_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:07d}.jsonl.gz"


def step_files(folder: Path) -> dict[int, Path]:
    """The files of a journal by step, in order."""
    found = {path: re.fullmatch(r"step_(\d{7,})\.jsonl\.gz", path.name) for path in folder.glob("step_*.jsonl.gz")}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match))


def read_step(path: Path) -> StepRecord | None:
    """What a file of the journal holds, up to its first damaged record; None if there is no file or no header in it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    records = _records(data, path)
    header = next(records, None)
    if header is None or header.get("format") != FORMAT:
        return None
    step = StepRecord(header["settings"])
    for record in records:
        if "kept" in record:
            step.kept, step.state = record["kept"], record["state"]
        else:
            sample = sample_of(record)
            step.samples[sample.group_index, sample.index] = sample
    return step


def differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """The names of settings whose values differ, as text such as `lr 0.1 instead of 0.2`."""
    names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    return [f"{name} {found.get(name)!r:.60} instead of {expected.get(name)!r:.60}" for name in names]


def sample_record(sample: Sample) -> dict[str, Any]:
    """A finished sample as JSON can hold it, without what its row of the prompt data gives: text, label, metadata."""
    trace = sample.trace
    return {
        "group_index": sample.group_index,
        "index": sample.index,
        "file": sample.file,
        "row": sample.row,
        "prompt_ids": trace.prompt_ids,
        "response_ids": trace.response_ids,
        "loss_mask": trace.loss_mask,
        "log_probs": trace.log_probs,
        "segments": [list(asdict(segment).values()) for segment in trace.segments],
        "status": sample.status,
        "stop_reason": sample.stop_reason,
        "reward": sample.reward,
        "reward_components": sample.reward_components,
        "rollout_metrics": sample.rollout_metrics,
        "notes": plain_notes(sample.notes),
        "weight_version": sample.weight_version,
        "error": sample.error,
    }


def sample_of(record: Mapping[str, Any]) -> Sample:
    """The sample that `sample_record` wrote, without what its row gives."""
    values = dict(record)
    trace = TokenTrace(
        prompt_ids=values.pop("prompt_ids"),
        response_ids=values.pop("response_ids"),
        loss_mask=values.pop("loss_mask"),
        log_probs=values.pop("log_probs"),
        segments=[Segment(*segment) for segment in values.pop("segments")],
    )
    values["status"] = SampleStatus(values["status"])
    values["stop_reason"] = None if values["stop_reason"] is None else check_reason(values["stop_reason"])
    return Sample(prompt="", trace=trace, **values)


def plain_notes(notes: Mapping[str, Any]) -> dict[str, Any]:
    """The notes that JSON can hold; the others, which only logs show, as text."""
    try:
        text = json.dumps(notes, default=str)
    except (TypeError, ValueError, RecursionError):  # such as keys that are no text
        return {name: repr(value)[:1000] for name, value in notes.items()}
    plain: dict[str, Any] = json.loads(text)
    return plain


def _member(record: Mapping[str, Any]) -> bytes:
    return gzip.compress(json.dumps(record).encode() + b"\n", compresslevel=1, mtime=0)


def _rewrite(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file as a whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as file:
        for record in records:
            file.write(_member(record))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _records(data: bytes, path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, up to the first that is torn or whose checksum is wrong."""
    view, position, count = memoryview(data), 0, 0
    while position < len(data):
        read = _read_member(view[position:])
        if read is None:
            logger.warning("%s: what follows record %d is damaged, and is dropped", path, count)
            return
        text, length = read
        yield json.loads(text)
        position, count = position + length, count + 1


def _read_member(view: memoryview) -> tuple[bytes, int] | None:
    """The content of the first member and its length in the file (bytes); None if it is damaged."""
    member, parts, fed = zlib.decompressobj(wbits=GZIP_MEMBER), [], 0
    while not member.eof:
        piece = view[fed : fed + PIECE]
        if not piece:
            return None
        try:
            parts.append(member.decompress(piece))
        except zlib.error:
            return None
        fed += len(piece)
    return b"".join(parts), fed - len(member.unused_data)
