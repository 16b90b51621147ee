"""Sends weights to engines on the same machine, in buckets: in requests, or in memory that the requests name.

    push_weights(urls, model.hf_weights(), version="3")

A bucket is written once into shared memory (a file of /dev/shm), from which every rank of every engine reads it; the
next bucket takes its place. Where there is too little shared memory, as in a container with Docker's 64 MB, and with
`in_band`, the bytes travel in the request: copied and encoded for each rank of an engine, since SGLang lets a rank read
only its own part of a request.
"""

from __future__ import annotations

import base64
import io
import logging
import pickle
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import orjson
import torch
import torch.multiprocessing as mp

from sleuth.leftovers import record
from sleuth.weight_sync.buckets import (
    NamedTensor,
    ReusedBuffer,
    flatten,
    make_buckets,
    mark_last,
    size_of,
)
from sleuth.weight_sync.control import PauseMode, paused_engines, raise_errors

logger = logging.getLogger(__name__)

SHARED_MEMORY = "/dev/shm"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def push_weights(
    urls: Sequence[str],
    named_tensors: Iterable[NamedTensor],
    version: str,
    *,
    bucket_bytes: int | None = None,
    tensor_parallel_size: int = 1,
    in_band: bool = False,
    mode: PauseMode = "abort",
    timeout: float = 600.0,
) -> None:
    """Give every engine at `urls` the full tensors `named_tensors` (Hugging Face names) as weights `version`.

    The engines are paused meanwhile (`mode`: see `paused_engines`), and their prefix caches emptied afterwards.
    `tensor_parallel_size` is that of one engine; each of its ranks cuts its share out of the same tensors. `timeout`:
    seconds for one request. Raises WeightSyncError, which says whether the engines are left paused.

    `named_tensors` is always iterated to its end, even after a failure: other ranks may wait in its collectives.
    """
    started = time.monotonic()
    remaining = iter(named_tensors)
    sent = 0
    buffer = ReusedBuffer(shared_buffer)
    local = not in_band and all(urlsplit(url).hostname in LOOPBACK for url in urls)
    try:
        with paused_engines(urls, mode=mode, timeout=timeout) as engines:
            engines.open_session()
            for bucket, is_last in mark_last(make_buckets(remaining, bucket_bytes)):
                size = size_of(bucket)
                # The engines have copied the bucket before, or they would not have answered.
                flat = flatten(bucket, buffer.room(size) if local and has_shared_memory(size) else None)
                part = version if is_last else None
                bodies = [bucket_request(bucket, flat, tensor_parallel_size, part) for _ in urls]
                engines.weights_touched = True
                requests = engines.start("update_weights_from_tensor", bodies)
                raise_errors(request.result() for request in requests)
                sent += size
            engines.close_session()
    finally:
        deque(remaining, maxlen=0)
    logger.info(
        "weights %s: %.1f MB to %d engine(s) in %.2f s", version, sent / 1e6, len(urls), time.monotonic() - started
    )


def has_shared_memory(size: int) -> bool:
    """Whether there is room for two buckets of `size` bytes: pages beyond the room would kill this process."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free > 2 * size
    except OSError:
        return False


def shared_buffer(size: int) -> torch.Tensor:
    """Bytes [size] in a file of shared memory; it goes with the last process that has it."""
    with _sharing_by_name():
        storage = torch.UntypedStorage._new_shared(size)
        manager, name, _ = storage._share_filename_cpu_()
    record(Path(SHARED_MEMORY + name.decode()), Path(manager.decode()).parent)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def bucket_request(bucket: list[NamedTensor], flat: torch.Tensor, ranks: int, version: str | None) -> bytes:
    """The JSON body of one `/update_weights_from_tensor` for one engine, with an entry for each of its ranks.

    `flat` [B], the bucket's bytes: if they lie in shared memory, an entry has their place, else the bytes themselves.
    """
    entries, start = [], 0
    for name, tensor in bucket:
        end = start + tensor.nbytes
        # What SGLang calls FlattenedTensorMetadata, by its fields: its own class is out of reach here, since importing
        # sglang needs the engine's stand-ins on a CPU.
        fields = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype}
        entries.append(SimpleNamespace(**fields, start_idx=start, end_idx=end, numel=tensor.nbytes))
        start = end
    return orjson.dumps(
        {
            "serialized_named_tensors": _encoded({"flattened_tensor": flat, "metadata": entries}, ranks),
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": version,
        }
    )


def _encoded(payload: dict[str, Any], ranks: int) -> list[str]:
    """The pickled payload in base64, for each reader."""
    if not payload["flattened_tensor"].is_shared():
        payload |= {"flattened_tensor": payload["flattened_tensor"].cpu()}
        return [base64.b64encode(pickle.dumps(payload, protocol=pickle.HIGHEST_PROTOCOL)).decode()] * ranks
    encoded = []
    for _ in range(ranks):  # anew each time: to pickle it counts one reader, who gives that back
        file = io.BytesIO()
        with _sharing_by_name():
            ForkingPickler(file, pickle.HIGHEST_PROTOCOL).dump(payload)
        encoded.append(base64.b64encode(file.getvalue()).decode())
    return encoded


@contextmanager
def _sharing_by_name() -> Iterator[None]:
    """Within, tensors are shared by a file's name; by its descriptor, torch's default, kills the server."""
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        mp.set_sharing_strategy(before)
