"""Tensors in memory that two processes share, as text: what a trainer rank hands to an engine's rank.

    text = encode({"flattened_tensor": flat, "metadata": [...]})      # anew for each reader
    payload = decode(text)                                            # what the engine does; here for checks

In the text is not the tensor but a handle of its memory: CUDA's (IPC) for a GPU's, the name of a file in /dev/shm for
`shared_buffer`'s. It is the text that SGLang's MultiprocessingSerializer reads and makes, without SGLang, whose import
needs the engine's stand-ins on a CPU. `by_uuid` and `rebuild_by_uuid` are all that is for GPUs alone.
"""

from __future__ import annotations

import base64
import io
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing import reductions

SHARED_MEMORY = "/dev/shm"
DEVICE_ARGUMENT = 6
"""Where `rebuild_cuda_tensor` takes the device."""


def encode(payload: Any) -> str:
    """The payload, whose tensors lie in shared memory or on a GPU, for one reader.

    The caller keeps them, unchanged, for as long as the reader may use them. Memory of a GPU stays taken until the
    reader has let go of it, also when the caller has.
    """
    file = io.BytesIO()
    with _sharing_by_name():
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(payload)
    return base64.b64encode(file.getvalue()).decode()


def encode_bytes(payload: Any) -> str:
    """The payload with the bytes of its tensors, for any number of readers, who need not be on this machine."""
    return base64.b64encode(pickle.dumps(payload, pickle.HIGHEST_PROTOCOL)).decode()


def decode(text: str) -> Any:
    """The payload, with tensors in the same memory as the sender's."""
    return _Unpickler(io.BytesIO(base64.b64decode(text))).load()


def shared_buffer(size: int) -> Tensor:
    """Bytes [size] in a file of shared memory; it goes with the last process that has it."""
    from sleuth.leftovers import record  # here: it needs a package that a GPU's memory can do without

    with _sharing_by_name():
        storage = torch.UntypedStorage._new_shared(size)
        manager, name, _ = storage._share_filename_cpu_()
    record(Path(SHARED_MEMORY + name.decode()), Path(manager.decode()).parent)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def has_shared_memory(size: int) -> bool:
    """Whether there is room for two buckets of `size` bytes: pages beyond the room would kill this process."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free > 2 * size
    except OSError:
        return False


def by_uuid(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """How to rebuild a GPU's tensor elsewhere: torch's way, but the device goes by its UUID.

    torch names it by its number here, which is another one in a process that sees other GPUs.
    """
    rebuild, arguments = reductions.reduce_tensor(tensor)
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])


def rebuild_by_uuid(*arguments: Any) -> Tensor:
    """The other side of `by_uuid`; ValueError if this process does not see the GPU."""
    uuid = arguments[DEVICE_ARGUMENT]
    seen = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise ValueError(f"expected the GPU {uuid} in CUDA_VISIBLE_DEVICES, this process sees {seen}; add it there")
    rebuild: Callable[..., Tensor] = reductions.rebuild_cuda_tensor
    return rebuild(*arguments[:DEVICE_ARGUMENT], seen.index(uuid), *arguments[DEVICE_ARGUMENT + 1 :])


class _Pickler(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        return by_uuid(value) if isinstance(value, Tensor) and value.is_cuda else NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"):
            return rebuild_by_uuid
        return super().find_class(module, name)


@contextmanager
def _sharing_by_name() -> Iterator[None]:
    """Within, tensors are shared by a file's name; by its descriptor, torch's default, kills the server."""
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        mp.set_sharing_strategy(before)
