"""Small questions about files and folders that several parts ask."""

from __future__ import annotations

import os
from pathlib import Path


def nearest_existing(path: Path) -> Path:
    """`path` itself where it exists, else the closest of its parents that does."""
    return next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())


def follow_umask(folder: Path) -> None:
    """Give the files under `folder` the mode that new files get here: some libraries make theirs for their owner only.

    Who may read them is then the user's choice, by umask, as for everything else that a run writes.
    """
    mode = 0o666 & ~_umask()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


def _umask() -> int:
    # It can be read only by setting it. What another thread makes meanwhile is for its owner alone, at worst.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
