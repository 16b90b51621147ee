"""The faults: each a function that does it to a `Trial`, and returns what is known of it afterwards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fault_trials.trial import SAMPLES, STEPS, Trial, TrialError, send

Row = dict[str, Any]
"""`noticed`: seconds from the fault until the run had noticed it; `said`: its words; `exact`: see `Trial`."""

MOMENTS: dict[str, tuple[str, Callable[[Trial], object]]] = {
    "rollout": ("3 samples of step 3 are finished", lambda trial: len(trial.recorded(3)) >= 3),
    "training": ("the samples of step 3 are whole", lambda trial: trial.rolled_out(3)),
    "sync": ("the engine has the weights of step 3", lambda trial: trial.log_says("engine_0.log", "new_version='3'")),
    "evaluation": ("the weights of step 3 are sent", lambda trial: trial.log_says("trainer_0.log", "weights 3:")),
    "saving": ("a hidden folder for step 2 is there", lambda trial: any(trial.save.glob(".unfinished-iter_0000002"))),
}
PARTS = {"engine": "engine_0.log", "trainer": "trainer_0.log", "rollout actor": "rollout.log", "retriever": ""}
ENDED = re.compile(r"^error: |; it is started again", re.M)
"""What a run says of a part that has ended: that it ends itself, or that it goes on."""
STOPPED = re.compile(r"stopped|oldest: |does not answer|no answer|timed out", re.I)
JOURNAL_MOMENTS: list[tuple[str, Callable[[Trial], object]]] = [
    ("the first sample", lambda trial: trial.recorded(1)),
    ("a quarter of step 1", lambda trial: len(trial.recorded(1)) >= SAMPLES // 4),
    ("step 1 but for its end", lambda trial: len(trial.recorded(1)) >= SAMPLES - 1),
    ("training on step 1", lambda trial: trial.rolled_out(1)),
    ("the first sample of step 2", lambda trial: trial.recorded(2)),
    ("training on step 2", lambda trial: trial.rolled_out(2)),
    ("saving step 2", lambda trial: any(trial.save.glob(".unfinished-iter_0000002"))),
    ("half of step 3", lambda trial: len(trial.recorded(3)) >= SAMPLES // 2),
    ("sending the weights of step 3", lambda trial: trial.log_says("engine_0.log", "new_version='3'")),
    ("all of step 4", lambda trial: len(trial.recorded(4)) >= SAMPLES),
]


def killed_whole(name: str) -> Callable[[Trial], Row]:
    """SIGKILL of the whole tree at a moment of `MOMENTS`; then the run is started again."""

    def row(trial: Trial) -> Row:
        what, condition = MOMENTS[name]
        trial.start()
        trial.wait_for(lambda: condition(trial), what)
        trial.kill_all()
        gone = trial.wait(lambda: not trial.processes(), "the end of what was killed")
        return {"noticed": round(gone, 1), **_finished(trial)}

    return row


def killed_part(name: str) -> Callable[[Trial], Row]:
    """SIGKILL of one part in the rollout of step 3; the run ends, or goes on by itself."""

    def row(trial: Trial) -> Row:
        trial.start()
        trial.wait_for(lambda: len(trial.recorded(3)) >= 3, "3 samples of step 3")
        send(_part(trial, name), signal.SIGKILL)
        noticed = trial.wait(lambda: ENDED.search(trial.output()) or not trial.lives, "a word about what has ended")
        code, said = trial.end(), trial.said(ENDED)
        if code == 0:
            return {"noticed": round(noticed, 1), "said": said, "exact": trial.is_exact()}
        return {"noticed": round(noticed, 1), **_finished(trial), "said": said}

    return row


def stopped_part(name: str) -> Callable[[Trial], Row]:
    """SIGSTOP of one part in the rollout of step 2, until the run names it; then SIGCONT."""

    def row(trial: Trial) -> Row:
        trial.start()
        trial.wait_for(lambda: len(trial.recorded(2)) >= 3, "3 samples of step 2")
        victims = _part(trial, name)
        before = len(trial.output())
        send(victims, signal.SIGSTOP)
        try:
            noticed = trial.wait_for(lambda: STOPPED.search(trial.output(), before), "a word about what is stopped")
        finally:
            send(victims, signal.SIGCONT)
        said = trial.said(STOPPED, before)
        if code := trial.end():
            return {"noticed": round(noticed, 1), **_finished(trial), "said": f"{said}; ended with {code}"}
        return {"noticed": round(noticed, 1), "said": said, "exact": trial.is_exact()}

    return row


def full_disk(trial: Trial) -> Row:
    """--save on a disk that has room for one checkpoint of two; then it is made larger."""
    trial.save.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=45m", "tmpfs", str(trial.save)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        raise TrialError("only root may mount a small disk, where that is allowed at all")
    try:
        trial.start()
        code = trial.end()
        said = trial.said(ENDED)
        if code == 0:
            raise TrialError("expected the disk to be full, but the run had room for all checkpoints")
        subprocess.run(["mount", "-o", "remount,size=500m", str(trial.save)], check=True)
        return {"noticed": None, **_finished(trial), "said": said}
    finally:
        trial.kill_all()
        subprocess.run(["umount", "-l", str(trial.save)], check=True)


def journal(trial: Trial) -> Row:
    """Ten kills of one run, each at another moment; no sample that was recorded may ever change."""
    before: dict[tuple[int, int, int], Any] = {}
    reached = []
    for what, condition in JOURNAL_MOMENTS:
        trial.start()
        trial.wait(lambda: condition(trial) or not trial.lives, what)  # noqa: B023 (it is waited for here)
        if not trial.lives:
            raise TrialError(f"the run ended before {what}: {trial.last_words()}")
        reached.append(what)
        trial.kill_all()
        trial.wait(lambda: not trial.processes(), "the end of what was killed")
        now = _all_recorded(trial)
        if any(now.get(key) != sample for key, sample in before.items()):
            return {"noticed": None, "said": f"a sample was lost or changed at: {what}", "exact": False}
        before |= now
    found = _finished(trial)
    final = _all_recorded(trial)
    whole = len(final) == STEPS * SAMPLES and all(final[key] == sample for key, sample in before.items())
    return found | {"noticed": None, "exact": found["exact"] and whole, "moments": reached}


def _all_recorded(trial: Trial) -> dict[tuple[int, int, int], Any]:
    return {(step, *key): sample for step in range(1, STEPS + 1) for key, sample in trial.recorded(step).items()}


def _part(trial: Trial, name: str) -> list[psutil.Process]:
    if name == "retriever":
        assert trial.retriever is not None
        return [psutil.Process(trial.retriever.pid)]
    driver = trial.process.pid if trial.process else 0
    found = [process for process in trial.processes(PARTS[name]) if process.pid != driver]
    if not found:
        raise TrialError(f"expected a process that writes {PARTS[name]}, found none")
    return found


def _finished(trial: Trial) -> Row:
    """Start the run again and let it come to its end."""
    trial.start()
    if code := trial.end():
        return {"said": f"the resumed run ended with {code}: {trial.last_words()}", "exact": False}
    return {"said": trial.resumed(), "exact": trial.is_exact()}


ROWS: dict[str, tuple[str, Callable[[Trial], Row]]] = {
    **{f"kill in {name}": (f"SIGKILL of all processes: {MOMENTS[name][0]}", killed_whole(name)) for name in MOMENTS},
    **{f"dead {name}": (f"SIGKILL of the {name} in a rollout", killed_part(name)) for name in PARTS},
    "full disk": ("--save on a disk with room for one checkpoint", full_disk),
    "journal": (f"{len(JOURNAL_MOMENTS)} SIGKILLs of all processes, at different moments", journal),
    **{f"stopped {name}": (f"SIGSTOP of the {name} in a rollout", stopped_part(name)) for name in PARTS},
}
"""Name: what is done, and the function that does it."""


def outcome(name: str, folder: Path) -> Row:
    """Do one row in a new folder. A trial that could not be made is no verdict: `exact` is None then."""
    done, row = ROWS[name]
    began = time.monotonic()
    trial = Trial(folder)
    try:
        found = row(trial)
    except TrialError as error:
        found = {"noticed": None, "said": f"not tried: {error}", "exact": None}
    finally:
        trial.close()
    return {"name": name, "done": done, **found, "seconds": round(time.monotonic() - began)}
