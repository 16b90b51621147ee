"""Kills a small run with a journal at every file operation, and at half of every write; then once more, and resumes it.

    python -m tests.rollout.journal_kills FOLDER       prints the moments at which it was killed, as JSON

A process of one thread, which forks: each child is a run that goes on from what those before it left. It "generates"
samples that are different each time, and "trains" by a hash over the samples of its steps in order, so that a sample
that is lost, made again or used twice leads to another hash or to a difference in what a step was trained on.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from sleuth import checkpoints
from sleuth.rollout.journal import Journal, read_step, sample_record, step_files
from sleuth.sample import Sample, SampleStatus, StopReason, TokenTrace

STEPS, GROUPS, MEMBERS, SAVE_INTERVAL = 3, 2, 2, 2
OPERATIONS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")


class Clock:
    """Counts operations, and kills the process at one of them."""

    def __init__(self, deadline: int | None, told: int) -> None:
        self.deadline, self.told, self.count, self.doing = deadline, told, 0, "start"

    def is_now(self, what: str) -> bool:
        self.count += 1
        if self.count != self.deadline:
            return False
        os.write(self.told, f"{self.doing}: {what}".encode())
        return True

    def tick(self, what: str) -> None:
        if self.is_now(what):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in OPERATIONS:
            self.tick(f"before {event}")


class TearingFile(io.BufferedIOBase):
    """A file of the journal: a kill may come before, in the middle of and after each write."""

    def __init__(self, file: Any, clock: Clock) -> None:
        self.file, self.clock = file, clock

    def write(self, data: Any) -> int:
        self.clock.tick("before a write")
        if self.clock.is_now("half written"):
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        self.file.write(data)
        self.file.flush()
        self.clock.tick("written")
        return len(data)

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        return int(self.file.fileno())

    def close(self) -> None:
        super().close()  # which flushes
        self.file.close()


def run(folder: Path, clock: Clock) -> None:
    """From the newest checkpoint to the last step."""
    sys.addaudithook(clock.on_event)
    open_path = pathlib.Path.open

    def opened(self: Path, mode: str = "r", *words: Any, **named: Any) -> Any:
        file = open_path(self, mode, *words, **named)
        return TearingFile(file, clock) if mode in ("wb", "ab") and self.parent.name == "journal" else file

    pathlib.Path.open = opened  # type: ignore[assignment,method-assign]
    found = checkpoints.find_checkpoint(folder)
    state = json.loads((found / "metadata.json").read_text()) if found else {"step": 0, "hash": ""}
    journal = Journal(folder, folder, {"lr": 0.1})
    journal.start()
    for step in range(state["step"] + 1, STEPS + 1):
        clock.doing = "beginning a step"
        entry = journal.step(step)
        clock.doing = "a sample"
        groups = [[finished_sample(entry, group, member) for member in range(MEMBERS)] for group in range(GROUPS)]
        clock.doing = "the end of a step"
        entry.finish(groups, {"step": step})
        clock.doing = "training"
        records = [sample_record(sample) for group in groups for sample in group]
        state = {"step": step, "hash": train(folder / "used", state["hash"], step, records)}
        clock.tick("trained")
        if step % SAVE_INTERVAL == 0 or step == STEPS:
            clock.doing = "saving"
            save(folder, state)


def finished_sample(entry: Any, group: int, member: int) -> Sample:
    """From the journal, or generated and scored, which gives another result each time."""
    new = Sample(group * MEMBERS + member, group, "who?", TokenTrace([1, 2, 3 + group]))
    if (found := entry.take(new)) is not None:
        return found  # type: ignore[no-any-return]
    made = random.SystemRandom()
    new.trace.append_model([made.randrange(99), 6], [-made.random(), -0.5])
    new.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)
    new.set_reward(made.random())
    asyncio.run(entry.record(new))
    return new


def train(used: Path, before: str, step: int, records: list[dict[str, Any]]) -> str:
    """The hash of all samples so far. A step that is trained on again must get the samples that it had."""
    text = json.dumps(records)
    used.mkdir(exist_ok=True)
    place = used / str(step)
    assert not place.exists() or place.read_text() == text, f"step {step} is trained on other samples than before"
    (used / ".new").write_text(text)
    (used / ".new").rename(place)
    return hashlib.sha256((before + text).encode()).hexdigest()


def save(folder: Path, state: dict[str, Any]) -> None:
    checkpoints.tidy(folder)
    unfinished = checkpoints.unfinished_folder(folder, state["step"])
    unfinished.mkdir()
    (unfinished / "metadata.json").write_text(json.dumps(state))
    checkpoints.publish(unfinished, folder, state["step"])


def forked(folder: Path, deadline: int | None) -> str | None:
    """One run in a process of its own; where it was killed, None if it came to its end."""
    reader, told = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(folder, Clock(deadline, told))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(told)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        moment = pipe.read()
    if os.WIFSIGNALED(status):
        return moment
    assert os.waitstatus_to_exitcode(status) == 0, f"a run that goes on failed (after {moment!r})"
    return None


def recorded(folder: Path) -> dict[tuple[int, int, int], dict[str, Any]]:
    """What the journal holds: records by step and place."""
    found = {}
    for step, path in step_files(folder / "journal").items():
        record = read_step(path)
        for (group, index), sample in (record.samples if record else {}).items():
            found[step, group, index] = sample_record(sample)
    return found


def check(folder: Path, seen: dict[tuple[int, int, int], dict[str, Any]]) -> None:
    """The end is that of a run which was not killed, with the samples that were used; all that were seen are."""
    text, used = "", {}
    for step in range(1, STEPS + 1):
        records = json.loads((folder / "used" / str(step)).read_text())
        assert len({(one["group_index"], one["index"]) for one in records}) == GROUPS * MEMBERS
        used |= {(step, one["group_index"], one["index"]): one for one in records}
        text = hashlib.sha256((text + json.dumps(records)).encode()).hexdigest()
    final = checkpoints.find_checkpoint(folder)
    assert final is not None
    assert json.loads((final / "metadata.json").read_text()) == {"step": STEPS, "hash": text}
    for key, record in seen.items():
        assert json.dumps(used[key]) == json.dumps(record), f"sample {key} was lost and made again"


def main(folder: Path) -> None:
    moments: list[str] = []
    deadline, at_end = 0, False
    while not at_end:
        deadline += 1
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        seen: dict[tuple[int, int, int], dict[str, Any]] = {}
        for kill in (deadline, deadline * 7 % 23 + 1, None):  # the second one in the run that goes on
            moment = forked(folder, kill)
            at_end = at_end or (kill == deadline and moment is None)
            moments += [moment] if moment else []
            now = recorded(folder)
            assert all(now.get(key, record) == record for key, record in seen.items()), "a record was replaced"
            seen |= now
            if moment is None:
                break
        check(folder, seen)
    sys.stdout.write(json.dumps({"runs": deadline, "moments": {name: moments.count(name) for name in moments}}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
