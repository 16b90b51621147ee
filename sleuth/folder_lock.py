"""A lock on a folder, so that two runs never write to it at once.

    with locked("--run-dir", folder):
        ...                             # ValueError, which names host, pid and since when, if another run has it

`flock` on a file in the folder does it where it holds, which is on every local disk and on NFS with locks: the kernel
lets it go when the process ends, however that happens. Some shared folders lock within one host only, or not at all. So
the file also names the process, and its time stamp is renewed every few seconds: a process of another host, whose time
stamp moves, lives. Nothing is left to be cleared by hand.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sleuth.paths import full_folder
from sleuth.processes import ProcessName

logger = logging.getLogger(__name__)

LOCK = ".sleuth.lock"
BEAT_SECONDS = 5.0
SILENT_SECONDS = 30.0
"""After so long without a beat, a holder that cannot be seen from here is taken for dead."""
_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


@contextmanager
def locked(name: str, folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, which is made if needed; `name` is the setting that names it, for messages.

    Raises ValueError if another process holds it, OSError if the folder cannot be written to. A holder on another host
    that may have died costs up to SILENT_SECONDS.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    ended = threading.Event()
    beating = threading.Thread(target=_beat, args=(descriptor, ended), daemon=True)
    try:
        free = _flock(descriptor)
        holder = _read(descriptor)
        if free is False or (holder and _lives(holder, path)):
            raise ValueError(_refusal(name, folder, holder or {}))
        record = json.dumps({"process": ProcessName.of(os.getpid()).to_dict(), "since": time.time(), "what": _what()})
        _write(descriptor, record, folder)
        if free is None and _read_text(path) != record:
            raise ValueError(_refusal(name, folder, _read(descriptor)))  # two came at once
        beating.start()
        try:
            yield
        finally:
            ended.set()
            beating.join()
            with contextlib.suppress(OSError):  # a disk that went away
                os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _flock(descriptor: int) -> bool | None:
    """Whether the lock is ours now; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return None
        raise
    return True


def _beat(descriptor: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(descriptor)


def _lives(holder: dict[str, Any], path: Path) -> bool:
    """Whether the process that the file names still runs."""
    process = ProcessName.read(holder.get("process"))
    if process is None:
        return False
    runs = process.runs()
    return _beats(path, process) if runs is None else runs


def _beats(path: Path, process: ProcessName) -> bool:
    """Whether the time stamp of the file moves. All times are those of the server that has the folder."""
    last = _time_stamp(path)
    silent_for = _now_at(path.parent) - last
    if silent_for >= SILENT_SECONDS:
        return False
    logger.warning(
        "%s is locked by process %d on %s, last seen %.0f s ago; waiting at most %.0f s to see whether it still runs",
        *(path.parent, process.pid, process.host, silent_for, SILENT_SECONDS - silent_for),
    )
    deadline = time.monotonic() + SILENT_SECONDS - max(silent_for, 0.0)
    while time.monotonic() < deadline:
        time.sleep(min(1.0, BEAT_SECONDS))
        if _time_stamp(path) != last:
            return True
    return False


def _time_stamp(path: Path) -> float:
    with open(path, "rb") as file:  # opened anew: NFS then asks the server instead of its cache
        return os.fstat(file.fileno()).st_mtime


def _now_at(folder: Path) -> float:
    """The time of the server that has `folder`: the clocks of hosts differ."""
    probe = folder / f"{LOCK}.{os.getpid()}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _read(descriptor: int) -> dict[str, Any]:
    try:
        record = json.loads(os.pread(descriptor, 65536, 0))
    except ValueError:  # empty: nobody has it
        return {}
    return record if isinstance(record, dict) else {}


def _read_text(path: Path) -> str:
    time.sleep(1.0)
    return path.read_text()


def _write(descriptor: int, record: str, folder: Path) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, record.encode(), 0)
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(full_folder(error, folder) or f"cannot write to {folder}: {error}") from None


def _what() -> str:
    return Path(sys.argv[0]).name or "python"


def _refusal(name: str, folder: Path, holder: dict[str, Any]) -> str:
    process = ProcessName.read(holder.get("process"))
    if process is None:
        by, stop = "another run", ""
    else:
        since = datetime.fromtimestamp(float(holder.get("since", 0)), UTC)
        by = f"process {process.pid} on {process.host} ({holder.get('what')}), since {since:%Y-%m-%d %H:%M:%S} UTC"
        stop = f", stop it (kill {process.pid} on {process.host})"
    return (
        f"{name}: expected a folder that no other run uses, found {folder} in use by {by}; wait for its end{stop}, or "
        "name another folder"
    )
