"""Removes what killed runs left behind: engines' folders, files in /dev/shm, Ray's sessions.

    record(folder, file)        # by whoever makes them: these go with this process
    remove_leftovers()          # at the next start

What ends in order removes its own. What is killed cannot, so each process notes what it makes in a small file of a
folder that is the user's alone. The next start reads the notes and removes what processes left that no longer run:
only what was noted, only while it is still the same file and the user's own, and only where the process could be seen
from here if it ran. `python -m sleuth.leftovers PID FOLDER` notes a folder for a script.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from sleuth.processes import ProcessName

logger = logging.getLogger(__name__)


def record(*paths: Path, pids: Iterable[int] = ()) -> None:
    """Note that `paths`, which exist, are left over once this process and all of `pids` have ended.

    Where no note can be written, a debug line says so: no run ends for that.
    """
    try:
        processes = [ProcessName.of(pid).to_dict() for pid in dict.fromkeys((os.getpid(), *pids))]
        _write(processes, paths)
    except (OSError, ValueError) as error:
        logger.debug("what this process leaves cannot be noted: %s", error)


def remove_leftovers() -> list[Path]:
    """Remove what ended processes of this user left; returns the paths."""
    removed: list[Path] = []
    for note in _notes():
        try:
            content = json.loads(note.read_text())
            processes = [ProcessName.read(process) for process in content["processes"]]
            items = [(Path(item["path"]), int(item["device"]), int(item["inode"])) for item in content["paths"]]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being written, or of another version
        if all(process is not None and process.runs() is False for process in processes):
            removed += [path for path, *place in items if _remove(path, place)]
            with contextlib.suppress(OSError):
                note.unlink()
    if removed:
        logger.info("removed what ended runs had left: %s", ", ".join(map(str, removed)))
    return removed


def _write(processes: list[dict[str, Any]], paths: Iterable[Path]) -> None:
    found = [(path, path.lstat()) for path in paths]
    items = [{"path": str(path), "device": status.st_dev, "inode": status.st_ino} for path, status in found]
    folder = _folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_ours(folder)
    handle, name = tempfile.mkstemp(prefix=f"{os.getpid()}-", suffix=".tmp", dir=folder)
    with open(handle, "w") as file:
        json.dump({"processes": processes, "paths": items}, file)
    os.replace(name, Path(name).with_suffix(".json"))


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"sleuth-{os.getuid()}"


def _check_ours(folder: Path) -> None:
    """OSError if someone else made the folder, or can write to it: its name can be guessed."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is not this user's own folder")


def _notes() -> Iterator[Path]:
    folder = _folder()
    try:
        _check_ours(folder)
    except OSError:
        return
    yield from sorted(folder.glob("*.json"))


def _remove(path: Path, place: list[int]) -> bool:
    """Whether `path` was still what was noted, and is gone now."""
    try:
        status = path.lstat()
        if [status.st_dev, status.st_ino] != place or status.st_uid != os.getuid() or _is_used(path):
            return False
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError:
        return False
    return True


def _is_used(folder: Path) -> bool:
    """Whether a command line names the folder, as those of Ray's processes, which may outlive their driver a little."""
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and any(str(folder) in word for word in process.info["cmdline"] or ()):
            return True
    return False


if __name__ == "__main__":
    _write([ProcessName.of(int(sys.argv[1])).to_dict()], [Path(sys.argv[2])])
