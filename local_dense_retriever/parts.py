"""Makes a file by joining parts or unpacking another. It appears whole or not at all; a killed join can resume."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

BLOCK = 1 << 20


def partial_path(path: Path) -> Path:
    """The path at which a file grows until it is whole."""
    return path.with_name(f"{path.name}.part")


def size_of(path: Path) -> int:
    """The size of a file in bytes; 0 if there is none."""
    return path.stat().st_size if path.is_file() else 0


def progress_bar(name: str, total: int, initial: int = 0) -> tqdm[Any]:
    return tqdm(total=total, initial=initial, desc=name, unit="B", unit_scale=True, mininterval=1)


def joined_bytes(target: Path) -> int:
    """How many bytes of the target an interrupted `join` has already written."""
    return size_of(partial_path(target))


def join(names: Sequence[str], sizes: Sequence[int], target: Path, *, delete: bool) -> Path:
    """Join the parts in the target's folder, in the order of `names`; `delete` removes each part once it is copied.

    An interrupted join continues where it was: a part that is completely in `<target>.part` need not exist any more.
    """
    partial, total, end = partial_path(target), sum(sizes), 0
    if delete and not partial.exists():
        target.with_name(names[0]).replace(partial)  # no copy, so no space
    with partial.open("ab") as out, progress_bar(f"joining {target.name}", total, out.tell()) as bar:
        for name, size in zip(names, sizes, strict=True):
            end += size
            part = target.with_name(name)
            if out.tell() < end:
                with part.open("rb") as file:
                    file.seek(out.tell() - (end - size))
                    while block := file.read(BLOCK):
                        out.write(block)
                        bar.update(len(block))
            out.flush()
            os.fsync(out.fileno())
            if delete:
                part.unlink(missing_ok=True)
    if size_of(partial) != total:
        raise ValueError(f"{partial}: expected {total} bytes, found {size_of(partial)}; remove it and run this again")
    partial.replace(target)
    return target


def unpack(packed: Path, target: Path, *, delete: bool) -> Path:
    """Unpack a .gz file to `target`; ValueError if its own checksum shows that it is broken."""
    partial = partial_path(target)
    with (
        packed.open("rb") as file,
        progress_bar(f"unpacking {packed.name}", size_of(packed)) as bar,
        partial.open("wb") as out,
    ):
        try:
            with gzip.open(file) as content:
                while block := content.read(BLOCK):
                    out.write(block)
                    bar.update(file.tell() - bar.n)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{packed} cannot be unpacked ({error}); remove it and download it again") from None
        out.flush()
        os.fsync(out.fileno())
    partial.replace(target)
    if delete:
        packed.unlink()
    return target
