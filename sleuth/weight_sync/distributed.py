"""Trainer to engines on devices of their own: one broadcast a bucket, over NCCL on GPUs and gloo on CPUs.

    group = BroadcastGroup(urls)                 once a run, in the one trainer process that sends
    group.push(model.hf_weights(), version="3")
    group.close()

The process group has the trainer as rank 0 and every rank of every engine after it. Requests over HTTP only say which
tensors come next.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from sleuth.weight_sync.buckets import DEFAULT_BUCKET_BYTES, NamedTensor, flatten, make_buckets, mark_last
from sleuth.weight_sync.control import EngineGroup, PauseMode, WeightSyncError, paused_engines, raise_errors

logger = logging.getLogger(__name__)

JOIN_SECONDS = 120.0
CLOSE_SECONDS = 10.0
POLL_SECONDS = 0.001

Requests = list[Future[str | None]]
Result = TypeVar("Result")


class BroadcastGroup:
    """The trainer's end of a process group with all engines at `urls`, each of `tensor_parallel_size` ranks.

    Making one waits until all have joined; WeightSyncError names an engine that does not, at once if it refuses or
    cannot be reached, else after `join_timeout` seconds. `timeout`: seconds for one bucket, and for one request.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        tensor_parallel_size: int = 1,
        timeout: float = 600.0,
        join_timeout: float = JOIN_SECONDS,
    ) -> None:
        self.urls = list(urls)
        self.timeout = timeout
        self.name = f"sleuth-{uuid.uuid4().hex[:12]}"
        self._group = self._join(tensor_parallel_size, join_timeout)

    def push(
        self,
        named_tensors: Iterable[NamedTensor],
        version: str,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        mode: PauseMode = "abort",
    ) -> None:
        """Give every engine the full tensors `named_tensors` (Hugging Face names) as weights `version`.

        As `sleuth.weight_sync.tensor.push_weights` does: engines pause meanwhile (`mode`: see `paused_engines`), their
        prefix caches are emptied, WeightSyncError says whether they are left paused, and `named_tensors` is always
        iterated to its end. The next bucket is gathered while the engines load the one before.
        """
        started = time.monotonic()
        remaining = iter(named_tensors)
        sent = 0
        try:
            with paused_engines(self.urls, mode=mode, timeout=self.timeout) as engines:
                engines.open_session()
                loading: Requests = []
                for bucket, is_last in mark_last(make_buckets(remaining, bucket_bytes)):
                    flat = flatten(bucket)
                    raise_errors(request.result() for request in loading)
                    loading = self._send(engines, flat, bucket, version if is_last else None)
                    sent += flat.nbytes
                raise_errors(request.result() for request in loading)
                engines.close_session()
        finally:
            deque(remaining, maxlen=0)
        seconds = time.monotonic() - started
        logger.info("weights %s: %.1f MB to %d engine(s) in %.2f s", version, sent / 1e6, len(self.urls), seconds)

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
        # Port 0: the store takes one that is free, so that no other process can get it in between.
        store = dist.TCPStore(address, 0, world, is_master=True, timeout=limit, wait_for_workers=False)
        common = {"master_address": address, "master_port": store.port, "world_size": world}
        common |= {"group_name": self.name, "backend": backend}
        bodies = [common | {"rank_offset": 1 + i * tensor_parallel_size} for i in range(len(self.urls))]
        with closing(EngineGroup(self.urls, join_timeout)) as engines:
            requests = engines.start("init_weights_update_group", bodies)
            joining = _in_background(lambda: _new_group(backend, store, self.name, world, self.timeout))
            _wait_for(joining.done, requests, join_timeout, "the process group for weights was not formed")
            raise_errors(request.result() for request in requests)
        return joining.result()

    def _send(
        self, engines: EngineGroup, flat: torch.Tensor, bucket: list[NamedTensor], version: str | None
    ) -> Requests:
        """Broadcast one bucket; what is returned are the requests that end once it is loaded."""
        body: dict[str, Any] = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self.name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": version,
        }
        engines.weights_touched = True
        requests = engines.start("update_weights_from_distributed", [body] * len(self.urls))
        work = dist.broadcast(flat, 0, group=self._group, async_op=True)
        _wait_for(work.is_completed, requests, self.timeout, f"a bucket of {flat.nbytes / 1e6:.1f} MB was not received")
        try:
            work.wait()
        except RuntimeError as error:  # an engine that died; its request says which, a moment later
            _wait_for(lambda: False, requests, 1.0, f"a broadcast of weights failed: {error}")
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


def _wait_for(done: Callable[[], bool], requests: Requests, seconds: float, trouble: str) -> None:
    """Until `done()`. WeightSyncError as soon as a request has failed, since the others would then wait for ever."""
    deadline = time.monotonic() + seconds
    while not done():
        raise_errors(request.result() for request in requests if request.done())
        if time.monotonic() > deadline:
            raise WeightSyncError(f"{trouble} within {seconds:.0f} s: is an engine stuck? (see its log)", paused=True)
        time.sleep(POLL_SECONDS)


def _in_background(action: Callable[[], Result]) -> Future[Result]:
    """`action()` in a thread that the interpreter does not wait for at its end."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
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
