"""One sender and all engines in a process group: a broadcast a bucket, over NCCL on GPUs and gloo on CPUs.

The sender is rank 0, and every rank of every engine comes after it. Requests over HTTP only say which tensors come
next. `sleuth.weight_sync.distributed` has the whole update.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from sleuth.meeting import open_meeting
from sleuth.weight_sync.buckets import NamedTensor, ReusedBuffer, flatten, make_buckets, mark_last, size_of
from sleuth.weight_sync.control import EngineGroup, Requests, WeightSyncError, raise_errors, wait_for

JOIN_SECONDS = 120.0
CLOSE_SECONDS = 10.0
POLL_SECONDS = 0.001
BUCKET_BYTES = 128 * 2**20
"""On a CPU, where a request costs as much time as some megabytes; on a GPU it is that of all ways."""
APART_BYTES = 2**18
"""Tensors of this size, in the mean of a bucket, are broadcast one by one on a CPU."""

Result = TypeVar("Result")


class Sender:
    """The sender's end of a process group with all engines at `urls`, each of `tensor_parallel_size` ranks.

    Making one waits until all have joined; WeightSyncError names an engine that does not, at once if it refuses or
    cannot be reached, else after `join_timeout` seconds. `timeout`: seconds for one bucket.
    """

    def __init__(self, urls: Sequence[str], tensor_parallel_size: int, timeout: float, join_timeout: float) -> None:
        self.urls = list(urls)
        self.timeout = timeout
        self.name = f"sleuth-{uuid.uuid4().hex[:12]}"
        self._on_gpu = torch.cuda.is_available()
        device = "cuda" if self._on_gpu else "cpu"
        self._buffer = ReusedBuffer(lambda size: torch.empty(size, dtype=torch.uint8, device=device))
        self._group = self._join(tensor_parallel_size, join_timeout)

    def send(
        self, engines: EngineGroup, named_tensors: Iterable[NamedTensor], version: str | None, bucket_bytes: int | None
    ) -> int:
        """Have the engines, which are ready for it, load the tensors; returns how many bytes that were.

        The last bucket carries the version. The next one is gathered while the engines load the one before.
        """
        if bucket_bytes is None and not self._on_gpu:
            bucket_bytes = BUCKET_BYTES
        sent = 0
        loading: Requests = []
        for bucket, is_last in mark_last(make_buckets(named_tensors, bucket_bytes)):
            parts = self._parts(bucket)
            wait_for(loading)
            loading = self._send(engines, parts, bucket, version if is_last else None)
            sent += size_of(bucket)
        wait_for(loading)
        return sent

    def close(self) -> None:
        """Take the group down on both sides; an engine that is gone, or busy for long, is not waited for."""
        with closing(EngineGroup(self.urls, CLOSE_SECONDS)) as engines, suppress(WeightSyncError):
            engines.post("destroy_weights_update_group", {"group_name": self.name})
        # After a failure a broadcast may still be under way, which is waited for inside.
        leaving = _in_background(lambda: dist.destroy_process_group(self._group))
        with suppress(TimeoutError):
            leaving.result(CLOSE_SECONDS)

    def _join(self, tensor_parallel_size: int, join_timeout: float) -> dist.ProcessGroup:
        world = 1 + len(self.urls) * tensor_parallel_size
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        address, limit = _address_towards(self.urls[0]), timedelta(seconds=join_timeout)
        store = open_meeting(address, world, limit)
        common = {"master_address": address, "master_port": store.port, "world_size": world}
        common |= {"group_name": self.name, "backend": backend}
        bodies = [common | {"rank_offset": 1 + i * tensor_parallel_size} for i in range(len(self.urls))]
        with closing(EngineGroup(self.urls, join_timeout)) as engines:
            requests = engines.start("init_weights_update_group", bodies)
            joining = _in_background(lambda: _new_group(backend, store, self.name, world, self.timeout))
            _wait_until(joining.done, requests, join_timeout, "the process group for weights was not formed")
            wait_for(requests)
        return joining.result()

    def _parts(self, bucket: list[NamedTensor]) -> list[torch.Tensor]:
        """What is broadcast: the tensors as they are, or all their bytes in one, if they are small or on a GPU.

        Each broadcast costs a fraction of a millisecond; but one tensor less to copy into, on either side, is what
        counts on a CPU.
        """
        if self._on_gpu or size_of(bucket) < len(bucket) * APART_BYTES:
            return [flatten(bucket, self._buffer.room(size_of(bucket)))]  # the last broadcast is over
        return [tensor.detach().contiguous() for _, tensor in bucket]

    def _send(
        self, engines: EngineGroup, parts: list[torch.Tensor], bucket: list[NamedTensor], version: str | None
    ) -> Requests:
        """Broadcast one bucket; what is returned are the requests that end once it is loaded."""
        body: dict[str, Any] = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self.name,
            "load_format": "flattened_bucket" if len(parts) < len(bucket) else None,
            "flush_cache": False,
            "weight_version": version,
        }
        engines.weights_touched = True
        requests = engines.start("update_weights_from_distributed", [body] * len(self.urls))
        works = [dist.broadcast(part, group=self._group, group_src=0, async_op=True) for part in parts]
        trouble = f"a bucket of {size_of(bucket) / 1e6:.1f} MB was not received"
        _wait_until(lambda: all(work.is_completed() for work in works), requests, self.timeout, trouble)
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:  # an engine that died; its request says which, a moment later
            _wait_until(lambda: False, requests, 1.0, f"a broadcast of weights failed: {error}")
        return requests


def _new_group(backend: str, store: dist.Store, name: str, world: int, timeout: float) -> dist.ProcessGroup:
    """Rank 0 of a group beside the trainer's own.

    torch has no public way to one that spans programs; SGLang makes its end by the same two calls, and both ends must
    derive the same keys in the store.
    """
    from torch.distributed import distributed_c10d as c10d

    prefixed, limit = dist.PrefixStore(name, store), timedelta(seconds=timeout)
    group, _ = c10d._new_process_group_helper(
        world, 0, [], c10d.Backend(backend), prefixed, c10d.GroupName(name), timeout=limit
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    return group


def _wait_until(done: Callable[[], bool], requests: Requests, seconds: float, trouble: str) -> None:
    """Until `done()`. WeightSyncError as soon as a request has failed, since the others would then wait for ever."""
    deadline = time.monotonic() + seconds
    while not done():
        raise_errors(request.result() for request in requests if request.done())
        if time.monotonic() > deadline:
            raise WeightSyncError(f"{trouble} within {seconds:.0f} s: is an engine stuck? (see its log)", paused=True)
        time.sleep(POLL_SECONDS)


def _in_background(action: Callable[[], Result]) -> Future[Result]:
    """`action()` in a thread that the interpreter does not wait for at its end, on this thread's GPU."""
    future: Future[Result] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="weight-group").start()
    return future


def _address_towards(url: str) -> str:
    """This machine's address as the engine at `url` sees it."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((parts.hostname, parts.port))
        return str(probe.getsockname()[0])
