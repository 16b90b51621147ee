"""Sends weights to engines, in buckets that stay where they are: requests name only their memory.

    push_weights(urls, model.hf_weights(), version="3")                                a process with all the weights
    push_weights(urls, trainer.hf_weights(), "3", sources=sources, ranks=ranks)        every rank of a trainer

Each trainer rank has every bucket for a moment, since tensors are gathered one after the other, and puts it where its
own engine ranks read it (`sleuth.weight_sync.handles`): into its GPU, which is theirs, or into shared memory. Only the
handles go to rank 0, which posts them. There are two rooms: while the engines load one bucket, the next is gathered.

The bytes travel in the requests to an engine on another machine, where there is too little shared memory, as in a
container with Docker's 64 MB, and with `in_band`: copied for each rank of an engine, since SGLang lets a rank read only
its own part of a request.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import orjson
import torch
from torch import Tensor

from sleuth.weight_sync.buckets import NamedTensor, ReusedBuffer, flatten, make_buckets, mark_last, size_of
from sleuth.weight_sync.control import EngineGroup, PauseMode, Requests, paused_engines, wait_for
from sleuth.weight_sync.handles import encode, encode_bytes, has_shared_memory, shared_buffer
from sleuth.weight_sync.ranks import ALONE, Ranks
from sleuth.weight_sync.sources import Source

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")

Entries = dict[tuple[int, int], str]
"""By engine and rank of the engine: what that rank reads."""


def push_weights(
    urls: Sequence[str],
    named_tensors: Iterable[NamedTensor],
    version: str,
    *,
    sources: Sequence[Source] | None = None,
    ranks: Ranks = ALONE,
    bucket_bytes: int | None = None,
    in_band: bool = False,
    mode: PauseMode = "abort",
    timeout: float = 600.0,
) -> None:
    """Give every engine at `urls` the full tensors `named_tensors` (Hugging Face names) as weights `version`.

    All `ranks` call it together, with the same tensors in the same order; engine i gets its own from `sources[i]`
    (None: each is of one rank, and gets them from trainer rank 0). Each of an engine's ranks cuts its share out of
    the full tensors. The engines are paused meanwhile (`mode`: see `paused_engines`), and their prefix caches emptied
    afterwards. `timeout`: seconds for one request. Raises WeightSyncError on every rank; rank 0's says whether the
    engines are left paused.

    `named_tensors` is always iterated to its end, even after a failure: other ranks may wait in its collectives.
    """
    started = time.monotonic()
    remaining = iter(named_tensors)
    sources = sources or [Source((0,), same_node=urlsplit(url).hostname in LOOPBACK) for url in urls]
    update = _Update(sources, ranks, in_band, version)
    try:
        if ranks.leads:
            _lead(update, urls, make_buckets(remaining, bucket_bytes), mode, timeout)
        else:
            update.send(None, make_buckets(remaining, bucket_bytes))
    finally:
        deque(remaining, maxlen=0)
        update.let_go()
    if ranks.leads:
        seconds = time.monotonic() - started
        logger.info("weights %s: %.1f MB to %d engine(s) in %.2f s", version, update.sent / 1e6, len(urls), seconds)


def _lead(
    update: _Update, urls: Sequence[str], buckets: Iterator[list[NamedTensor]], mode: PauseMode, timeout: float
) -> None:
    ready = False
    try:
        with paused_engines(urls, mode=mode, timeout=timeout) as engines:
            engines.open_session()
            ready = True
            update.send(engines, buckets)
            engines.close_session()
    except Exception as error:
        if not ready:
            update.ranks.give_up(error)
        raise


class _Update:
    """One update as a rank sees it; `sent`: bytes of the buckets so far."""

    def __init__(self, sources: Sequence[Source], ranks: Ranks, in_band: bool, version: str) -> None:
        self.sent = 0
        self.ranks, self._version = ranks, version
        # Bytes are the same wherever they come from.
        self._sources = [
            source if source.same_node and not in_band else Source((0,) * len(source.ranks), same_node=False)
            for source in sources
        ]
        self._own: Entries = {}
        self._rooms = [ReusedBuffer(shared_buffer), ReusedBuffer(shared_buffer)]
        self._on_gpu: deque[Tensor] = deque(maxlen=2)

    def send(self, engines: EngineGroup | None, buckets: Iterator[list[NamedTensor]]) -> None:
        """Every rank prepares each bucket, and the one that has `engines` posts it."""
        self.ranks.exchange(lambda: None)  # the engines are ready
        loading: Requests = []
        for bucket, is_last in mark_last(buckets):
            found = self.ranks.exchange(lambda bucket=bucket, loading=loading: self._prepare(bucket, loading))  # type: ignore[misc]
            if engines is not None:
                entries = self._own | {place: text for part in found for place, text in part.items()}
                version = self._version if is_last else None
                bodies = [
                    request_body([entries[index, rank] for rank in range(len(source.ranks))], version)
                    for index, source in enumerate(self._sources)
                ]
                engines.weights_touched = True
                loading = engines.start("update_weights_from_tensor", bodies)
            self.sent += size_of(bucket)
        self.ranks.exchange(lambda: wait_for(loading))

    def let_go(self) -> None:
        """The engines have let go of the buckets, or will have: their memory is free then."""
        self._on_gpu.clear()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()

    def _prepare(self, bucket: list[NamedTensor], loading: Requests) -> Entries:
        """What engine ranks read that this rank serves; returns when the engines have loaded the bucket before."""
        entries = self._entries(bucket)
        wait_for(loading)
        if not self.ranks.leads:
            return entries
        self._own = entries  # without a detour: they may be large
        return {}

    def _entries(self, bucket: list[NamedTensor]) -> Entries:
        entries: Entries = {}
        metadata = describe(bucket)
        flats: dict[tuple[bool, bool], Tensor] = {}
        in_request = ""
        for index, source in enumerate(self._sources):
            for place, rank in enumerate(source.ranks):
                if rank != self.ranks.rank:
                    continue
                kind = (source.shares_gpu, source.same_node)
                if kind not in flats:
                    flats[kind] = self._flat(bucket, *kind)
                flat = flats[kind]
                payload = {"flattened_tensor": flat, "metadata": metadata}
                if flat.is_shared():
                    entries[index, place] = encode(payload)
                else:
                    entries[index, place] = in_request = in_request or encode_bytes(payload)
        return entries

    def _flat(self, bucket: list[NamedTensor], on_gpu: bool, same_node: bool) -> Tensor:
        """The bucket's bytes, on the same node in memory that an engine reads; on a GPU always in new memory.

        There an engine's answer does not say that its GPU has read them. Torch gives the memory to nobody else before.
        """
        if on_gpu:
            self._on_gpu.append(flatten(bucket))
            return self._on_gpu[-1]
        size = size_of(bucket)
        if same_node and has_shared_memory(size):
            self._rooms.reverse()  # the engines still read from the other one
            return flatten(bucket, self._rooms[0].room(size))
        return flatten(bucket).cpu()


def describe(bucket: list[NamedTensor]) -> list[SimpleNamespace]:
    """Where each tensor lies in the flat bucket: SGLang's FlattenedTensorMetadata, by its fields."""
    entries, start = [], 0
    for name, tensor in bucket:
        end = start + tensor.nbytes
        fields = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype}
        entries.append(SimpleNamespace(**fields, start_idx=start, end_idx=end, numel=tensor.nbytes))
        start = end
    return entries


def request_body(entries: list[str], version: str | None) -> bytes:
    """The JSON body of one `/update_weights_from_tensor`, with an entry for each of the engine's ranks."""
    body: dict[str, Any] = {"serialized_named_tensors": entries, "load_format": "flattened_bucket"}
    return orjson.dumps(body | {"flush_cache": False, "weight_version": version})
