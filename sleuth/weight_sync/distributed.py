"""Trainer to engines on devices of their own, over process groups: each pipeline stage sends its own weights.

    group = BroadcastGroup(urls)                               a process with all the weights
    group = BroadcastGroup(urls, stage=stage, ranks=ranks)     every rank of a trainer, once a run
    group.push(trainer.stage_weights(), version="3")
    group.close()

Of each stage the first rank is its sender, in a group with all engines (`sleuth.weight_sync.broadcast`). The stages
take turns, so that all engines see all buckets in one order; no rank ever holds tensors of another stage.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, nullcontext

from sleuth.weight_sync.broadcast import JOIN_SECONDS, Sender
from sleuth.weight_sync.buckets import NamedTensor
from sleuth.weight_sync.control import EngineGroup, PauseMode, paused_engines
from sleuth.weight_sync.ranks import ALONE, Ranks

logger = logging.getLogger(__name__)


class BroadcastGroup:
    """A rank's part in the groups of all stages' senders with the engines at `urls`; all `ranks` make it together.

    `stage`: this rank's pipeline stage. `tensor_parallel_size`: ranks of one engine. Making it waits until all have
    joined; WeightSyncError names an engine that does not, at once if it refuses or cannot be reached, else after
    `join_timeout` seconds. `timeout`: seconds for one bucket, and for one request.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        stage: int = 0,
        ranks: Ranks = ALONE,
        tensor_parallel_size: int = 1,
        timeout: float = 600.0,
        join_timeout: float = JOIN_SECONDS,
    ) -> None:
        self.urls = list(urls)
        self.timeout = timeout
        self._stage, self._ranks = stage, ranks
        stages = ranks.exchange(lambda: stage)
        self._senders = [stages.index(each) for each in sorted(set(stages))]
        self._sender: Sender | None = None
        for sender in self._senders:  # in turn: an engine joins one group at a time

            def join(mine: bool = sender == ranks.rank) -> None:
                if mine:
                    self._sender = Sender(urls, tensor_parallel_size, timeout, join_timeout)

            ranks.exchange(join)

    @property
    def name(self) -> str | None:
        """The name of this rank's group with the engines; None if it is no sender."""
        return self._sender.name if self._sender else None

    def push(
        self,
        stage_tensors: Iterable[NamedTensor],
        version: str,
        *,
        bucket_bytes: int | None = None,
        mode: PauseMode = "abort",
    ) -> None:
        """Give every engine all stages' full tensors `stage_tensors` (Hugging Face names) as weights `version`.

        As `sleuth.weight_sync.tensor.push_weights` does: engines pause meanwhile (`mode`: see `paused_engines`), their
        prefix caches are emptied, WeightSyncError on every rank, of which rank 0's says whether they are left paused,
        and `stage_tensors` is always iterated to its end.
        """
        started = time.monotonic()
        remaining = iter(stage_tensors)
        sent = 0
        try:
            if self._ranks.leads:
                sent = self._lead(remaining, version, bucket_bytes, mode)
            else:
                self._take_turns(None, remaining, version, bucket_bytes)
        finally:
            deque(remaining, maxlen=0)
        if self._ranks.leads:
            seconds, count = time.monotonic() - started, len(self.urls)
            logger.info("weights %s: %.1f MB to %d engine(s) in %.2f s", version, sent / 1e6, count, seconds)

    def close(self) -> None:
        """Take the group down on both sides; an engine that is gone, or busy for long, is not waited for."""
        if self._sender is not None:
            self._sender.close()

    def _lead(self, remaining: Iterator[NamedTensor], version: str, bucket_bytes: int | None, mode: PauseMode) -> int:
        ready = False
        try:
            with paused_engines(self.urls, mode=mode, timeout=self.timeout) as engines:
                engines.open_session()
                ready = True
                sent = self._take_turns(engines, remaining, version, bucket_bytes)
                engines.close_session()
                return sent
        except Exception as error:
            if not ready:
                self._ranks.give_up(error)
            raise

    def _take_turns(
        self, engines: EngineGroup | None, remaining: Iterator[NamedTensor], version: str, bucket_bytes: int | None
    ) -> int:
        """Every stage's turn, on every rank; returns the bytes of all stages. Only the leader has the `engines`."""
        self._ranks.exchange(lambda: None)  # the engines are ready
        total = 0
        for stage, sender in enumerate(self._senders):
            if engines is not None and sender != self._ranks.rank:
                engines.weights_touched = True  # by another rank
            part = version if sender == self._senders[-1] else None

            def turn(mine: bool = stage == self._stage, part: str | None = part) -> int:
                return self._turn(engines, remaining, part, bucket_bytes) if mine else 0

            total += sum(self._ranks.exchange(turn))
        return total

    def _turn(
        self,
        engines: EngineGroup | None,
        remaining: Iterator[NamedTensor],
        version: str | None,
        bucket_bytes: int | None,
    ) -> int:
        """This stage's turn: its sender sends, its other ranks take part in the gathers."""
        try:
            if self._sender is None:
                return 0
            own = nullcontext(engines) if engines else closing(EngineGroup(self.urls, self.timeout))
            with own as posting:
                return self._sender.send(posting, remaining, version, bucket_bytes)
        finally:
            deque(remaining, maxlen=0)
