"""How one rank of the trainer takes part in sending its weights, by the way that `--update-weights-through` names."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sleuth.arguments import Args
from sleuth.megatron.convert import write_hf_folder
from sleuth.megatron.trainer import Trainer
from sleuth.weight_sync.disk import load_weights_from_disk
from sleuth.weight_sync.distributed import BroadcastGroup
from sleuth.weight_sync.expected import check_weights
from sleuth.weight_sync.ranks import Ranks
from sleuth.weight_sync.sources import Source
from sleuth.weight_sync.tensor import push_weights

logger = logging.getLogger(__name__)

SHARD_BYTES = 10**9
"""Of the weights on their way to a folder this much is held in host memory, on rank 0."""


class WeightPush:
    """A rank's part; `push` is collective, and so is the first one's check of names and shapes.

    `sources`: which ranks serve which engine, where weights do not travel over a network.
    """

    def __init__(self, args: Args, run_dir: Path, trainer: Trainer, sources: Sequence[Source]) -> None:
        self._args, self._run_dir, self._trainer, self._sources = args, run_dir, trainer, sources
        self._ranks = Ranks.of_trainer()
        self._bytes = 0
        self._group: BroadcastGroup | None = None

    def push(self, urls: list[str], version: str, engines: Sequence[int] | None = None) -> None:
        """Send the weights as `version` to the engines at `urls`: all, or those with the numbers `engines`."""
        sources = self._sources if engines is None else [self._sources[index] for index in engines]
        if not self._bytes:
            self._check(urls)
        through = self._args.update_weights_through
        if through == "distributed":
            self._by_broadcast(urls, version)
        elif through == "disk":
            self._by_disk(urls, version)
        else:
            weights, in_band = self._trainer.hf_weights(), through == "in_band"
            part = partial(push_weights, sources=sources, ranks=self._ranks, timeout=self._args.sync_timeout)
            part(urls, weights, version, in_band=in_band)

    def close(self) -> None:
        """Leave the process group with the engines, where there is one."""
        if self._group is not None:
            self._group.close()

    def _check(self, urls: list[str]) -> None:
        described = self._trainer.described_weights()
        self._ranks.exchange(lambda: check_weights(urls, described) if self._ranks.leads else None)
        self._bytes = sum(tensor.nbytes for tensor in described.values())

    def _by_broadcast(self, urls: list[str], version: str) -> None:
        """Over process groups that are made before the first update and kept for the run."""
        if self._group is not None and self._group.urls != urls:  # one was started again
            self._group.close()
            self._group = None
        if self._group is None:
            size, stage = len(self._sources[0].ranks), self._trainer.stage
            self._group = BroadcastGroup(
                urls, stage=stage, ranks=self._ranks, tensor_parallel_size=size, timeout=self._args.sync_timeout
            )
        self._group.push(self._trainer.stage_weights(), version)

    def _by_disk(self, urls: list[str], version: str) -> None:
        """Rank 0 writes what all gather, a shard at a time."""
        weights, folder = self._trainer.hf_weights(), self._run_dir / "weights"
        dtype = str(self._trainer.dtype).removeprefix("torch.")

        def take_part() -> None:
            try:
                if self._ranks.leads:
                    source = Path(self._args.hf_checkpoint)
                    write = partial(write_hf_folder, needed_bytes=self._bytes, shard_bytes=SHARD_BYTES, replace=True)
                    write(weights, source, folder, dtype)
            finally:  # the gathers are collective: every rank takes part to the end
                deque(weights, maxlen=0)

        self._ranks.exchange(take_part)
        if self._ranks.leads:
            load_weights_from_disk(urls, folder, version, timeout=self._args.sync_timeout)
