"""Checkpoints as folders: which is the newest, and how a finished one takes its place.

`sleuth.megatron.checkpoint` writes and reads their content.

    <folder>/latest_checkpointed_iteration.txt      the tracker: the step of the newest whole checkpoint
    <folder>/newest_good_iteration.txt              the step of the newest that training is known to have gone on from
    <folder>/iter_0000020/                          a whole checkpoint

A checkpoint is written to a hidden folder beside its place (`unfinished_folder`); `publish` then renames the folder and
writes its step into the tracker. At every moment the tracker names a whole checkpoint, so a kill or a full disk costs
only the checkpoint that is being saved. The next save removes what was left over.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
GOOD = "newest_good_iteration.txt"
DESCRIPTION = "sleuth.json"
CONFIGURATION = "config.yaml"
"""The configuration of the run that saved a checkpoint."""
JOURNAL = "journal"
"""The folder beside the checkpoints that `sleuth.rollout.journal` writes."""
_UNFINISHED, _REPLACED = ".unfinished-", ".replaced-"
_CURRENT_FOLDER, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV)


def checkpoint_folder(folder: Path, step: int) -> Path:
    """The path of the checkpoint of `step` under `folder`."""
    return folder / f"iter_{step:07d}"


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` is itself a checkpoint."""
    return (folder / "metadata.json").is_file()


def holds_checkpoint(folder: Path) -> bool:
    """Whether `folder` is a folder of checkpoints, or one of them."""
    return (folder / TRACKER).is_file() or is_checkpoint(folder)


def find_checkpoint(folder: Path, iteration: int | None = None) -> Path | None:
    """The newest checkpoint under `folder` (or that of `iteration`), or None where there is none yet.

    `folder` may also be a checkpoint itself. Raises ValueError if the tracker names one that is not there.
    """
    if is_checkpoint(folder):
        return folder
    place = _tracked(folder) if iteration is None else checkpoint_folder(folder, iteration)
    if place is None:
        return None
    for candidate in (place, place.with_name(_REPLACED + place.name)):
        if is_checkpoint(candidate):
            return candidate
    present = sorted(path.name for path in folder.glob("iter_*")) if folder.is_dir() else []
    by = f", which {folder / TRACKER} names" if iteration is None else ""
    raise ValueError(
        f"expected the checkpoint {place}{by}, found {', '.join(present) or 'none'}; copy it there, or name a "
        "checkpoint itself"
    )


def read_description(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself; {} if it was written by something else. ValueError if it cannot be read."""
    path = checkpoint / DESCRIPTION
    try:
        description: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(
            f"expected a JSON object in {path}, found something else ({error}); copy the checkpoint again, or name "
            "another one"
        ) from error
    return description


def saved_step(folder: Path) -> int | None:
    """The step of the newest checkpoint under `folder`, found without loading it; None where there is none.

    Raises ValueError if the tracker names one that is not there.
    """
    found = find_checkpoint(folder)
    if found is None:
        return None
    by_name = re.search(r"iter_(\d+)$", found.name)
    return read_description(found).get("step", int(by_name[1]) if by_name else None)


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the whole checkpoints under `folder`, in order; none where there is no such folder."""
    names = (re.fullmatch(r"iter_(\d{7,})", path.name) for path in folder.glob("iter_*") if is_checkpoint(path))
    return sorted(int(name[1]) for name in names if name)


def resuming_problem(checkpoint: Path, *, distributed: bool) -> str | None:
    """Why training cannot go on from `checkpoint` with --use-distributed-optimizer `distributed`; None if it can."""
    description = read_description(checkpoint)
    if description.get("optimizer_steps") is None:
        return (
            f"expected a training checkpoint in --load {checkpoint}, found weights without optimizer state; "
            "pass it as --ref-load, or add --finetune, to start a new run from it"
        )
    if description.get("distributed_optimizer", distributed) != distributed:
        return (
            f"--use-distributed-optimizer is {distributed}, but the checkpoint in {checkpoint} was saved with "
            f"{not distributed}; give the flag as it was then"
        )
    return None


def _tracked(folder: Path) -> Path | None:
    """The checkpoint that the tracker in `folder` names; None if there is no tracker."""
    tracker = folder / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(errors="replace").strip()
    if text == "release":
        return folder / text
    if not text.isdecimal():
        raise ValueError(
            f"expected a step number or release in {tracker}, found {text[:80]!r}; name a checkpoint itself"
        )
    return checkpoint_folder(folder, int(text))


def unfinished_folder(folder: Path, step: int) -> Path:
    """The hidden folder to write the checkpoint of `step` to."""
    return folder / f"{_UNFINISHED}{checkpoint_folder(folder, step).name}"


def tidy(folder: Path) -> None:
    """Prepare `folder` for a save: make it if needed, and remove what an unfinished save left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for replaced in folder.glob(f"{_REPLACED}*"):
        place = folder / replaced.name.removeprefix(_REPLACED)
        if is_checkpoint(place):
            replaced.rename(folder / f"{_UNFINISHED}{replaced.name}")
        else:
            replaced.rename(place)
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        logger.warning("removing %s, left over from a save that did not finish", leftover)
        shutil.rmtree(leftover)


def publish(unfinished: Path, folder: Path, step: int) -> None:
    """Move a finished checkpoint to its place, then name it in the tracker."""
    for path in [*unfinished.rglob("*"), unfinished]:
        _sync_to_disk(path)
    place = checkpoint_folder(folder, step)
    older = _replace(unfinished, place) if place.exists() else None  # a resumed run saves this step again
    if older is None:
        unfinished.rename(place)
    _sync_to_disk(folder)
    _write_text(folder, TRACKER, str(step))
    if older is not None:
        shutil.rmtree(older)


def prune(folder: Path, step: int, keep: int) -> None:
    """Keep `keep` checkpoints, that of `step` and the latest others, and the good one; delete the rest. 0 keeps all."""
    if keep == 0:
        return
    found = [path for path in folder.iterdir() if re.fullmatch(r"iter_\d{7,}", path.name)]
    # If the run resumed from an earlier checkpoint, the one just saved does not have the highest number.
    found.sort(key=lambda path: (path == checkpoint_folder(folder, step), path.name))
    good = good_checkpoint(folder)
    for path in found[:-keep]:
        if path == good:
            continue
        # Hidden first: a deletion that is cut short must not look like a checkpoint.
        doomed = folder / f"{_UNFINISHED}pruned-{path.name}"
        path.rename(doomed)
        shutil.rmtree(doomed)


def mark_good(folder: Path, step: int) -> None:
    """Note that training went on from the checkpoint of `step`: its weights gave a finite loss and gradient."""
    _write_text(folder, GOOD, str(step))


def good_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that training is known to have gone on from; None if there is none."""
    note = folder / GOOD
    text = note.read_text(errors="replace").strip() if note.is_file() else ""
    place = checkpoint_folder(folder, int(text)) if text.isdecimal() else None
    return place if place is not None and is_checkpoint(place) else None


def set_back(folder: Path, ruined: int) -> Path | None:
    """Have the tracker name the good checkpoint instead of that of step `ruined`.

    Returns the good one. None, and nothing is changed, if there is none or the tracker names another already.
    """
    good = good_checkpoint(folder)
    if good is None or _tracked(folder) != checkpoint_folder(folder, ruined) or good == _tracked(folder):
        return None
    _write_text(folder, TRACKER, good.name.removeprefix("iter_").lstrip("0") or "0")
    return good


def _replace(unfinished: Path, place: Path) -> Path:
    """Put `unfinished` in the place of another checkpoint; returns the path to which that one was moved."""
    if _exchange(unfinished, place):
        return unfinished
    # A kill between the two renames: `find_checkpoint` takes the older checkpoint, and the next save puts it back.
    older = place.with_name(_REPLACED + place.name)
    place.rename(older)
    unfinished.rename(place)
    return older


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step; False if the operating system or the file system (NFS) cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_CURRENT_FOLDER, os.fsencode(first), _CURRENT_FOLDER, os.fsencode(second), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def _write_text(folder: Path, name: str, text: str) -> None:
    """Write a small file of `folder` so that it is at every moment the old or the new one."""
    temporary = folder / f".{name}"
    temporary.write_text(text)
    _sync_to_disk(temporary)
    temporary.rename(folder / name)
    _sync_to_disk(folder)


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
