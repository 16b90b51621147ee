"""The lock on a folder, held by real processes that are really killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sleuth import folder_lock
from sleuth.folder_lock import LOCK, locked
from sleuth.processes import ProcessName

ROOT = Path(__file__).parents[1]
HOLD = """
import sys, time, pathlib
from sleuth.folder_lock import locked
with locked("--run-dir", pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", HOLD, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_process_is_told_who_has_the_folder_and_a_killed_one_leaves_it_free(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with (
            pytest.raises(ValueError, match="--save: expected a folder that no other run uses") as refused,
            locked("--save", tmp_path),
        ):
            pass
        for told in (
            f"process {process.pid} on {os.uname().nodename}",
            str(tmp_path),
            time.strftime("%Y-%m-%d"),
            "kill",
        ):
            assert told in str(refused.value)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with locked("--save", tmp_path):
            pass
    with locked("--save", tmp_path):  # also after an orderly end
        pass


def test_where_nothing_can_be_locked_the_process_in_the_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "_flock", lambda descriptor: None)
    with holder(tmp_path) as process, pytest.raises(ValueError, match=f"process {process.pid} "), locked("x", tmp_path):
        pass
    with locked("x", tmp_path):  # that one is dead
        pass


def elsewhere(folder: Path, silent_for: float) -> Path:
    """A lock file of a process on another host, last renewed so many seconds ago."""
    process = ProcessName("node7", "another-boot/1", os.getpid(), 1)
    path = folder / LOCK
    path.write_text(json.dumps({"process": process.to_dict(), "since": 0.0, "what": "train.py"}))
    os.utime(path, (time.time() - silent_for,) * 2)
    return path


def test_a_holder_on_another_host_lives_while_its_time_stamp_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = elsewhere(tmp_path, silent_for=3.0)
    monkeypatch.setattr(folder_lock, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(time, "sleep", lambda seconds: os.utime(path))
    with pytest.raises(ValueError, match=r"process \d+ on node7 "), locked("x", tmp_path):
        pass


def test_a_silent_holder_on_another_host_is_taken_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(tmp_path, silent_for=folder_lock.SILENT_SECONDS + 1)
    with locked("x", tmp_path):  # at once
        pass
    monkeypatch.setattr(folder_lock, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(folder_lock, "BEAT_SECONDS", 0.1)
    elsewhere(tmp_path, silent_for=0.5)
    with locked("x", tmp_path):
        pass


def test_the_time_stamp_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "BEAT_SECONDS", 0.05)
    with locked("x", tmp_path):
        os.utime(tmp_path / LOCK, (0, 0))
        time.sleep(0.5)
        assert (tmp_path / LOCK).stat().st_mtime > 1


def test_an_ended_process_whose_pid_is_given_again_does_not_run(tmp_path: Path) -> None:
    own = ProcessName.of(os.getpid())
    assert own.runs() is True
    assert ProcessName.read(own.to_dict()) == own
    assert ProcessName(own.host, own.place, own.pid, own.started - 1).runs() is False
    with subprocess.Popen(["sleep", "60"]) as child:
        name = ProcessName.of(child.pid)
        assert name.runs() is True
        child.kill()
        while name.runs():  # ends, and waits to be noticed
            time.sleep(0.01)
    assert ProcessName.read({"pid": 1}) is None
