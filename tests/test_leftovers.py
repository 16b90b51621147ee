"""What killed processes left is removed, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sleuth import leftovers
from sleuth.leftovers import record, remove_leftovers
from sleuth.processes import ProcessName
from sleuth.weight_sync.handles import shared_buffer

ROOT = Path(__file__).parents[1]
MAKE = """
import sys, time, pathlib
from sleuth.leftovers import record
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
(folder / "inside").touch()
record(folder)
print("made", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Notes of this test alone, for it and its processes."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@contextmanager
def maker(program: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, *map(str, words)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_killed_process_leaves_its_folder_to_the_next_start(tmp_path: Path) -> None:
    folder = tmp_path / "left"
    with maker(MAKE, folder) as process:
        assert line(process) == "made"
        assert remove_leftovers() == []  # it lives
        assert folder.exists()
    folder.with_name("another").mkdir()
    assert remove_leftovers() == [folder]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "tmp"]
    assert remove_leftovers() == []


def test_a_folder_is_kept_while_a_process_works_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "left"
    with maker(MAKE, folder) as process:
        assert line(process) == "made"
    with maker("import sys, time; print(sys.argv[1], flush=True); time.sleep(60)", folder / "sockets/raylet") as other:
        assert line(other)
        assert remove_leftovers() == []
    assert folder.exists()


def note_of(process: ProcessName, path: Path) -> None:
    record(path)
    (note,) = leftovers._folder().glob("*.json")
    note.write_text(json.dumps(json.loads(note.read_text()) | {"processes": [process.to_dict()]}))


def test_a_pid_that_was_given_again_is_not_the_process_of_the_note(tmp_path: Path) -> None:
    own = ProcessName.of(os.getpid())
    file = tmp_path / "left"
    file.touch()
    note_of(ProcessName(own.host, own.place, own.pid, own.started - 1), file)
    assert remove_leftovers() == [file]


def test_what_cannot_be_seen_from_here_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "left"
    file.touch()
    note_of(ProcessName("node7", "another-boot/1", 1, 1), file)
    assert remove_leftovers() == []
    assert file.exists()


def test_what_took_the_place_of_a_leftover_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "left"
    with maker(MAKE, file) as process:
        assert line(process) == "made"
    file.rename(tmp_path / "moved")
    file.mkdir()
    assert remove_leftovers() == []
    assert file.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_another_users_files_and_notes_are_left_alone(tmp_path: Path, temporary_folder: Path) -> None:
    file = tmp_path / "left"
    with maker(MAKE, file) as process:
        assert line(process) == "made"
    os.chown(file, 12345, 12345)
    assert remove_leftovers() == []
    with maker(MAKE, tmp_path / "second") as process:
        assert line(process) == "made"
    os.chown(temporary_folder / "sleuth-0", 12345, 12345)
    assert remove_leftovers() == []  # notes that someone else may have written
    record(tmp_path)  # and none are written there


def test_memory_for_weights_goes_although_its_process_and_torchs_manager_were_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = """
import os, time
from sleuth.weight_sync.handles import shared_buffer
buffer = shared_buffer(4096)
import psutil
for child in psutil.Process().children():
    child.kill()
print([name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")][0], flush=True)
time.sleep(60)
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # torch's manager has a socket in it
        monkeypatch.setenv("TMPDIR", short)
        monkeypatch.setattr(tempfile, "tempdir", short)
        with maker(program) as process:
            name = line(process)
        file = Path("/dev/shm") / name
        assert file.exists()
        assert file in remove_leftovers()
        assert not file.exists()
        assert shared_buffer(10).is_shared()
