"""Reads a checkpoint's `.metadata`, a pickle, without running what a stranger may have put into it.

Torch unpickles the file with everything that Python can import. So it is read here first, by an unpickler that knows
only the types that describe tensors; what it refuses never reaches torch. Objects inside the data files and the other
files go through torch's own restricted unpickler (`weights_only`), which `restricted` forces.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

METADATA = ".metadata"
_RESTRICT, _DO_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_DESCRIPTIONS = "torch.distributed.checkpoint."
_ALLOWED = {
    ("collections", "OrderedDict"),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),  # the latter from Python 3.13 on
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (_DESCRIPTIONS + "filesystem", "_StorageInfo"),
    *(
        (_DESCRIPTIONS + "metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *(
        (_DESCRIPTIONS + "planner", name)
        for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    ),
}
"""What the checkpoints of this project and of megatron-core name in their `.metadata`, besides torch's dtypes."""


def read_metadata(checkpoint: Path) -> Metadata:
    """What tensors `checkpoint` holds, and where. ValueError, which names the file, if it cannot be read or trusted."""
    path = checkpoint / METADATA
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except FileNotFoundError as error:
        raise ValueError(
            f"expected a checkpoint of the format torch_dist, found no {path}; name another one"
        ) from error
    except _Refused as error:
        raise ValueError(
            f"expected descriptions of tensors alone in {path}, found {error}, which could run a stranger's code; "
            "nothing of it was loaded. Do not use this checkpoint, unless you can have it from a source that you trust"
        ) from None
    except Exception as error:  # a damaged pickle raises nearly anything
        reason = "it is empty" if path.stat().st_size == 0 else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is damaged ({reason}); copy it again, or name another checkpoint") from error
    if not isinstance(found, Metadata):
        raise ValueError(f"expected torch's Metadata in {path}, found {type(found).__name__}; name another checkpoint")
    return found


def data_problems(checkpoint: Path, metadata: Metadata) -> list[str]:
    """Data files that are missing or shorter than `metadata` says, as sentences that name them."""
    needed: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
    problems = []
    for name, size in sorted(needed.items()):
        path = checkpoint / name
        if len(PurePath(name).parts) != 1 or name == "..":
            problems.append(f"{checkpoint / METADATA} names a file outside of the checkpoint ({name!r:.80})")
        elif not path.is_file():
            problems.append(f"{path} is missing")
        elif (found := path.stat().st_size) < size:
            problems.append(f"{path} is empty" if not found else f"{path} has {found} bytes, expected at least {size}")
    return problems


@contextmanager
def restricted() -> Iterator[None]:
    """Inside the block, `torch.load` builds tensors and plain values only, whatever its caller asks for."""
    before = {name: os.environ.pop(name, None) for name in (_RESTRICT, _DO_NOT)}
    os.environ[_RESTRICT] = "1"
    try:
        yield
    finally:
        del os.environ[_RESTRICT]
        os.environ.update({name: value for name, value in before.items() if value is not None})


class _Refused(Exception):
    """A name that is not on the list."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise _Refused(f"{module}.{name}")
