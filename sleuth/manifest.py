"""The manifest of a checkpoint: its files, with size and checksum, so that damage is found before it is loaded.

    <checkpoint>/manifest.json      {"format": 1, "algorithm": "xxh3_128", "files": {"common.pt": [1895, "9f..."], ...}}

It is written as the last file of a checkpoint, in the folder that `sleuth.checkpoints.publish` then renames. It finds
what disks and copies do to files. It does not tell who wrote them: whoever can change a file can change it, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash

from sleuth.checkpoints import CONFIGURATION, checkpoint_folder, checkpoint_steps

MANIFEST = "manifest.json"
ALGORITHM = "xxh3_128"
_FORMAT = 1
_BLOCK_BYTES = 1 << 22
_THREADS = min(8, os.cpu_count() or 1)  # reading and hashing leave the interpreter to others
_NOT_LISTED = (MANIFEST, CONFIGURATION)  # the configuration comes when a checkpoint is in its place


class Entry(NamedTuple):
    """What is known of a file: its size, and the checksum of its content as hexadecimal digits."""

    bytes: int
    checksum: str


def entry_of(path: Path) -> Entry:
    """Read the whole file. OSError if it cannot be read."""
    content, size, block = xxhash.xxh3_128(), 0, bytearray(_BLOCK_BYTES)
    view = memoryview(block)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            content.update(view[:count])
            size += count
    return Entry(size, content.hexdigest())


def entries_of(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    """The entries of files of `folder`, read in several threads. OSError if one cannot be read."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="checksums") as pool:
        return dict(zip(names, pool.map(lambda name: entry_of(folder / name), names), strict=True))


def write_manifest(folder: Path, known: Mapping[str, Entry] | None = None) -> None:
    """List all files of `folder`; those that are not `known` yet are read."""
    entries = dict(known or {})
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {*_NOT_LISTED}
    entries |= entries_of(folder, sorted(names - entries.keys()))
    whole = {"format": _FORMAT, "algorithm": ALGORITHM, "files": {name: entries[name] for name in sorted(entries)}}
    (folder / MANIFEST).write_text(json.dumps(whole, indent=1), encoding="utf-8")


def read_manifest(checkpoint: Path) -> dict[str, Entry] | None:
    """The files that belong to `checkpoint`; None if it was saved before there were manifests.

    Raises ValueError, which names the file, if the manifest itself is damaged.
    """
    path = checkpoint / MANIFEST
    if not path.is_file():
        return None
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        if (whole["format"], whole["algorithm"]) != (_FORMAT, ALGORITHM):
            raise ValueError(f"format {whole['format']} with {whole['algorithm']}")
        return {name: Entry(int(size), str(checksum)) for name, (size, checksum) in whole["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected a manifest of format {_FORMAT} with {ALGORITHM} in {path}, found something else ({error}); "
            f"copy the checkpoint again, name another one, or remove {path.name} and give --no-verify"
        ) from error


def size_problems(checkpoint: Path, entries: Mapping[str, Entry]) -> list[str]:
    """What is wrong with the sizes of files, as sentences that name them. Reads no content."""
    return [problem for name, entry in entries.items() if (problem := _size_problem(checkpoint / name, entry.bytes))]


def content_problems(checkpoint: Path, entries: Mapping[str, Entry]) -> list[str]:
    """As `size_problems`; files of the right size are read, and their content is compared, in several threads."""

    def problem(name: str) -> str | None:
        path, entry = checkpoint / name, entries[name]
        if wrong := _size_problem(path, entry.bytes):
            return wrong
        try:
            found = entry_of(path)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        return None if found == entry else f"{path} has other content than when it was saved (its checksum differs)"

    largest_first = sorted(entries, key=lambda name: -entries[name].bytes)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="checksums") as pool:
        return [wrong for wrong in pool.map(problem, largest_first) if wrong]


def newest_whole(folder: Path, below: int) -> Path | None:
    """The newest checkpoint of `folder` of a step below `below` whose content is that of its manifest."""
    for step in reversed(checkpoint_steps(folder)):
        place = checkpoint_folder(folder, step)
        try:
            entries = read_manifest(place) if step < below else None
        except ValueError:
            continue
        if entries and not content_problems(place, entries):
            return place
    return None


def damage_message(checkpoint: Path, problems: list[str], whole: Path | None) -> str:
    """The error for a damaged checkpoint; `whole` is an older one that can be taken instead."""
    others = f" (and {len(problems) - 1} more of its files)" if len(problems) > 1 else ""
    remedy = (
        f"the newest older checkpoint that is whole is {whole}: name that one"
        if whole
        else f"no older one in {checkpoint.parent} is known to be whole"
    )
    return (
        f"expected the checkpoint {checkpoint} as it was saved, found it damaged: {problems[0]}{others}; {remedy}, or "
        "copy the damaged one again"
    )


def check_sizes(checkpoint: Path) -> None:
    """ValueError, as by `damage_message`, if a file of `checkpoint` is missing or was cut. Takes no time if not."""
    entries = read_manifest(checkpoint)
    if entries and (problems := size_problems(checkpoint, entries)):
        raise ValueError(damage_message(checkpoint, problems, older_whole(checkpoint)))


def older_whole(checkpoint: Path) -> Path | None:
    """The newest whole checkpoint beside `checkpoint`, and of an earlier step."""
    number = checkpoint.name.removeprefix("iter_")
    return newest_whole(checkpoint.parent, int(number)) if number.isdecimal() else None


def _size_problem(path: Path, expected: int) -> str | None:
    try:
        found = path.stat().st_size
    except OSError:
        return f"{path} is missing"
    if found == expected:
        return None
    return f"{path} is empty" if found == 0 else f"{path} has {found} bytes instead of {expected}"
