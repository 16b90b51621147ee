"""Small functions about files and folders that several modules use."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

WORKING_FOLDER = "SLEUTH_WORKING_FOLDER"
"""Names the folder in which the run was started, to its processes on every node."""


def enter_working_folder() -> None:
    """Go where the run was started, so that a relative path means the same there as here.

    A process of a Ray that ran before begins where Ray was started.
    """
    with contextlib.suppress(OSError):  # the folder is not on this node: relative paths then lead nowhere
        os.chdir(os.environ.get(WORKING_FOLDER, "."))


def nearest_existing(path: Path) -> Path:
    """`path` itself if it exists, else its closest parent that does."""
    return next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())


def check_writable(folder: Path, name: str) -> None:
    """ValueError, which begins with the setting's `name`, unless `folder` can be written to, or made."""
    existing = nearest_existing(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"{name}: expected a folder that can be written, found {existing}; choose another")


def full_folder(error: BaseException, *folders: Path) -> str | None:
    """A sentence that names the fullest of `folders`, if `error` says no more than that a disk is full; else None."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    if error.strerror != os.strerror(error.errno):
        return None  # it has a message of its own
    places = [nearest_existing(Path(error.filename) if error.filename else folder) for folder in folders]
    folder = min(places, key=lambda place: shutil.disk_usage(place).free)
    free = shutil.disk_usage(folder).free
    return f"expected room in {folder}, found {free / 1e6:.1f} MB free ({os.strerror(error.errno)}); make room there"


def follow_umask(folder: Path) -> None:
    """Give the files under `folder` the mode that new files get in this process.

    Some libraries make files that only their owner can read. Afterwards the user's umask decides who can read them, as
    it does for everything else that a run writes.
    """
    mode = 0o666 & ~_umask()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


def _umask() -> int:
    # Reading the umask means setting it. At worst, a file that another thread makes meanwhile gets a stricter mode.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
