"""Ends a process group and removes what it would leave behind. Imports nothing heavy: engines use it as they start."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


def group_members(group: int) -> list[psutil.Process]:
    """The living processes of a group."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def shared_memory_files(group: int) -> set[Path]:
    """The files of SGLang and of Python's multiprocessing in /dev/shm that processes of `group` have mapped."""
    inodes: set[int] = set()
    for process in group_members(group):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                _, _, _, _, inode, *path = line.split(maxsplit=5)
                if path and path[0].startswith(f"{SHARED_MEMORY}/"):
                    inodes.add(int(inode))
    # Compared by inode: a semaphore is renamed after its creation, but stays mapped under its first name.
    # sgl_shm_mq_: between the ranks of an engine of several.
    files = [file for pattern in ("sglang_*", "sgl_shm_mq_*", "sem.mp-*") for file in SHARED_MEMORY.glob(pattern)]
    return {file for file in files if _inode(file) in inodes}


def kill_group(group: int, folder: Path, known_files: Iterable[Path] = ()) -> None:
    """Kill every process of `group`; remove `folder`, the shared memory that they have mapped, and `known_files`.

    SGLang cleans up if it is asked to end, but takes 5 s or more for that. If it is killed, it leaves its sockets
    (which it keeps in `folder`) and its files in /dev/shm. If the caller is in the group, this does not return.
    """
    for file in shared_memory_files(group).union(known_files):
        with contextlib.suppress(OSError):
            file.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _inode(file: Path) -> int | None:
    try:
        return file.stat().st_ino
    except OSError:
        return None
