"""Sends weights to engines on the same machine: tensors in buckets, inside the requests themselves.

    push_weights(urls, model.hf_weights(), version="3")

Buckets are pickled into the request. Nothing is shared between the processes, so nothing can be freed too early, and
neither side depends on torch's sharing strategy (with `file_descriptor` a shared CPU tensor kills the server).
"""

from __future__ import annotations

import base64
import logging
import pickle
import time
from collections import deque
from collections.abc import Iterable, Sequence
from types import SimpleNamespace

import orjson

from sleuth.weight_sync.buckets import DEFAULT_BUCKET_BYTES, NamedTensor, flatten, make_buckets, mark_last
from sleuth.weight_sync.control import PauseMode, paused_engines

logger = logging.getLogger(__name__)


def push_weights(
    urls: Sequence[str],
    named_tensors: Iterable[NamedTensor],
    version: str,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    tensor_parallel_size: int = 1,
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
    try:
        with paused_engines(urls, mode=mode, timeout=timeout) as engines:
            engines.open_session()
            for bucket, is_last in mark_last(make_buckets(remaining, bucket_bytes)):
                # Only the last bucket carries the version: until then the weights are partly old, partly new.
                body = bucket_request(bucket, tensor_parallel_size, version if is_last else None)
                engines.change_weights("update_weights_from_tensor", body)
                sent += sum(tensor.nbytes for _, tensor in bucket)
            engines.close_session()
    finally:
        deque(remaining, maxlen=0)
    logger.info(
        "weights %s: %.1f MB to %d engine(s) in %.2f s", version, sent / 1e6, len(urls), time.monotonic() - started
    )


def bucket_request(bucket: list[NamedTensor], tensor_parallel_size: int, version: str | None) -> bytes:
    """The JSON body of one `/update_weights_from_tensor`: the bucket flattened, pickled and in base64."""
    entries, start = [], 0
    for name, tensor in bucket:
        end = start + tensor.nbytes
        # What SGLang calls FlattenedTensorMetadata, by its fields: its own class is out of reach here, since importing
        # sglang needs the engine's stand-ins on a CPU.
        fields = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype}
        entries.append(SimpleNamespace(**fields, start_idx=start, end_idx=end, numel=tensor.nbytes))
        start = end
    payload = {"flattened_tensor": flatten(bucket).cpu(), "metadata": entries}
    encoded = base64.b64encode(pickle.dumps(payload, protocol=pickle.HIGHEST_PROTOCOL)).decode()
    return orjson.dumps(
        {
            "serialized_named_tensors": [encoded] * tensor_parallel_size,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": version,
        }
    )
