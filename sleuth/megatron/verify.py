"""Checks a checkpoint before it is loaded: that its files are those that were saved, and that reading them is safe."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sleuth import manifest
from sleuth.megatron import parallel
from sleuth.megatron.stored_metadata import data_problems, read_metadata

logger = logging.getLogger(__name__)


def check_checkpoint(found: Path, *, verify: bool) -> None:
    """Raise ValueError, on all ranks, if `found` is damaged or not to be trusted; it names the file. Collective.

    With `verify` the content of all files is compared with the manifest; each rank reads its share of the files. A
    checkpoint from before there were manifests is checked like one without `verify`: that no file is missing or cut.
    """
    began = time.monotonic()
    entries: dict[str, manifest.Entry] | None = None
    mine: list[str] = []
    error: ValueError | None = None
    try:
        entries = manifest.read_manifest(found)
        if entries and verify:
            mine = manifest.content_problems(found, _share(entries))
        elif entries:
            mine = manifest.size_problems(found, entries)
        if not mine:
            mine = data_problems(found, read_metadata(found))
    except ValueError as problem:
        error = problem
    shares: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(shares, mine)
    if problems := sorted({problem for share in shares for problem in share}):
        raise ValueError(manifest.damage_message(found, problems, _from_first(lambda: manifest.older_whole(found))))
    parallel.raise_together(error)
    if dist.get_rank() == 0:
        _tell(found, entries, verify, time.monotonic() - began)


def _share(entries: dict[str, manifest.Entry]) -> dict[str, manifest.Entry]:
    """This rank's part of the files: every n-th by size."""
    names = sorted(entries, key=lambda name: (-entries[name].bytes, name))
    return {name: entries[name] for name in names[dist.get_rank() :: dist.get_world_size()]}


def _from_first(action: Callable[[], Any]) -> Any:
    """What `action` returns on rank 0, on every rank."""
    box = [action() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _tell(found: Path, entries: dict[str, manifest.Entry] | None, verify: bool, seconds: float) -> None:
    if entries is None:
        logger.warning("%s was saved without a %s: its content is not verified", found, manifest.MANIFEST)
    elif verify:
        size = sum(entry.bytes for entry in entries.values())
        logger.info("verified %s: %.3f GB in %.1f s", found, size / 1e9, seconds)
