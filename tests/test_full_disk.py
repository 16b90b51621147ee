"""A real file system that is full: which folder it is, is said."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sleuth.cluster import logs
from sleuth.cluster.logs import failure_message
from sleuth.folder_lock import locked
from sleuth.metrics.jsonl import MetricsFile


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]).returncode:
        pytest.skip("only root may mount a disk, where that is allowed at all")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), open(folder / "filling", "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def write_steps(file: MetricsFile) -> None:
    for step in range(1, 100):
        file.write(step, {"loss": 1.0, "name" * 100: 2.0})


def test_the_message_at_the_end_of_a_run_names_the_folder(small_disk: Path) -> None:
    file = MetricsFile(small_disk / "metrics.jsonl")
    fill(small_disk)
    with pytest.raises(OSError, match="No space left") as full:
        write_steps(file)
    told = failure_message(full.value, small_disk)
    assert told.startswith(f"error: expected room in {small_disk}, found 0.0 MB free (No space left on device); make")
    other = OSError(28, "the checkpoint needs about 5 GB, /save has 1 GB free")
    assert "the checkpoint needs about 5 GB, /save has" in failure_message(other, small_disk)


def test_a_run_that_cannot_even_begin_names_the_folder(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(OSError, match=rf"expected room in {small_disk}, found 0.0 MB free"), locked("x", small_disk):
        pass


def test_a_log_that_cannot_be_written_is_told_once(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = logs._LogFile(small_disk / "driver.log")
    fill(small_disk)
    record = logging.LogRecord("x", logging.INFO, "", 0, "m" * 5000, (), None)
    for _ in range(5):
        handler.emit(record)
    handler.close()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"the log {small_disk}/driver.log cannot be written: expected room in {small_disk}")
