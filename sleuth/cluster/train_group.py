"""The ranks of the trainer, each a Ray actor, behind one object."""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from torch import Tensor

from sleuth.algo.optimizer_steps import OptimizerStepBatch
from sleuth.arguments import Args
from sleuth.cluster.logs import configure_logging
from sleuth.cluster.memory_turns import Turn
from sleuth.cluster.placement import Placement
from sleuth.engine.devices import check_granted

if TYPE_CHECKING:
    from sleuth.megatron.lending import Part
    from sleuth.weight_sync.distributed import BroadcastGroup

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_SECONDS = 30.0


class TrainActor:
    """One rank of the Megatron trainer."""

    def __init__(self, args: Args, run_dir: Path, rank: int, world_size: int, gpu_id: str | None) -> None:
        configure_logging(run_dir, f"trainer_{rank}", args)
        self.args, self.run_dir, self.rank = args, run_dir, rank
        self.gpu_ids = [] if gpu_id is None else [gpu_id]
        self._broadcast: BroadcastGroup | None = None
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0")  # of the one GPU that it sees

    def rendezvous(self) -> tuple[str, int]:
        """The address of this node and a free port, at which the ranks' process group meets."""
        with socket.socket() as sock:
            sock.bind(("", 0))
            return ray.util.get_node_ip_address(), sock.getsockname()[1]

    def start(self, address: str, port: int) -> tuple[int, dict[str, Any]]:
        """Build or load model and optimizer; return the steps done so far and the rollout's state."""
        check_granted(self.gpu_ids)
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        from sleuth.megatron.trainer import Trainer  # needs RANK and the like in the environment

        self.trainer = Trainer(self.args)
        return self.trainer.steps_done, self.trainer.rollout_state

    def train(self, shards: Sequence[ray.ObjectRef]) -> dict[str, float]:
        """Fetch this rank's share, and no other, and train on it."""
        shard: list[OptimizerStepBatch] = ray.get(shards[self.trainer.data_parallel_rank])
        return self.trainer.train(shard)

    def lend(self, parts: tuple[Part, ...]) -> None:
        self.trainer.memory.lend(parts)

    def take_back(self, parts: tuple[Part, ...]) -> None:
        self.trainer.memory.take_back(parts)

    def score(self, token_ids: list[int]) -> list[float]:
        return self.trainer.log_probs(token_ids, temperature=1.0)

    def push_weights(self, engine_urls: list[str], version: str) -> None:
        """Gather the weights (all ranks) and send them to every engine (rank 0)."""
        from sleuth.megatron.weights import hf_names
        from sleuth.weight_sync.buckets import expect_names

        weights = self.trainer.hf_weights()
        try:
            if self.rank == 0:
                self._send(engine_urls, expect_names(weights, hf_names(self.trainer.shape)), version)
        finally:  # the gathers are collective: every rank takes part to the end
            deque(weights, maxlen=0)

    def _send(self, engine_urls: list[str], weights: Iterator[tuple[str, Tensor]], version: str) -> None:
        from sleuth.weight_sync.tensor import push_weights

        if self.args.update_weights_through == "disk":
            self._push_by_disk(engine_urls, weights, version)
        elif self.args.update_weights_through == "distributed":
            self._push_by_broadcast(engine_urls, weights, version)
        else:
            ranks, in_band = self.args.rollout_num_gpus_per_engine, self.args.update_weights_through == "in_band"
            push_weights(engine_urls, weights, version, tensor_parallel_size=ranks, in_band=in_band)

    def _push_by_broadcast(self, engine_urls: list[str], weights: Iterator[tuple[str, Tensor]], version: str) -> None:
        """Over a process group that is made before the first update and kept for the run."""
        from sleuth.weight_sync.distributed import BroadcastGroup

        if self._broadcast is None:
            ranks = self.args.rollout_num_gpus_per_engine if torch.cuda.is_available() else 1
            self._broadcast = BroadcastGroup(engine_urls, tensor_parallel_size=ranks)
        self._broadcast.push(weights, version)

    def _push_by_disk(self, engine_urls: list[str], weights: Iterator[tuple[str, Tensor]], version: str) -> None:
        from sleuth.megatron.convert import write_hf_folder
        from sleuth.weight_sync.disk import load_weights_from_disk

        tensors = {name: tensor.cpu().contiguous() for name, tensor in weights}
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        folder = self.run_dir / "weights"
        needed = sum(tensor.nbytes for tensor in tensors.values())
        source = Path(self.args.hf_checkpoint)
        write_hf_folder(tensors.items(), source, folder, dtype, replace=True, needed_bytes=needed)
        load_weights_from_disk(engine_urls, folder, version)

    def save(self, step: int, rollout_state: dict[str, Any]) -> None:
        self.trainer.save(step, rollout_state)

    def close(self) -> None:
        """Leave the process group with the engines, where there is one."""
        if self._broadcast is not None:
            self._broadcast.close()


class TrainGroup:
    """All ranks of the trainer."""

    def __init__(self, args: Args, run_dir: Path, placement: Placement) -> None:
        self.args = args
        remote: Any = ray.remote(TrainActor)
        env = {"TORCHDYNAMO_DISABLE": "1"} if placement.trainer[0].gpu_id is None else {}
        world_size = len(placement.trainer)
        self._actors = [
            remote.options(**placement.options(device, env)).remote(args, run_dir, rank, world_size, device.gpu_id)
            for rank, device in enumerate(placement.trainer)
        ]
        self.turn_to: Callable[[Turn], None] = lambda turn: None  # see `share_memory`
        address, port = ray.get(self._actors[0].rendezvous.remote())
        self._start = [actor.start.remote(address, port) for actor in self._actors]

    def wait_until_ready(self) -> tuple[int, dict[str, Any]]:
        """Steps done so far (0 in a new run) and the rollout state of the checkpoint ({} in a new run)."""
        return ray.get(self._start)[0]

    def train(self, shards: list[ray.ObjectRef]) -> dict[str, float]:
        """Train on one step's data, `shards[data-parallel rank]`; metrics are equal on all ranks."""
        self.turn_to(Turn.TRAIN)
        return ray.get([actor.train.remote(shards) for actor in self._actors])[0]

    def lend(self, parts: tuple[Part, ...]) -> None:
        """Free the memory of these parts on every rank's device."""
        ray.get([actor.lend.remote(parts) for actor in self._actors])

    def take_back(self, parts: tuple[Part, ...]) -> None:
        """Bring back what was lent."""
        ray.get([actor.take_back.remote(parts) for actor in self._actors])

    def push_weights(self, engine_urls: list[str], version: str) -> None:
        self.turn_to(Turn.SYNC)
        ray.get([actor.push_weights.remote(engine_urls, version) for actor in self._actors])

    def score(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities (nats, temperature 1) of each id but the first."""
        return ray.get([actor.score.remote(token_ids) for actor in self._actors])[0]

    def save(self, step: int, rollout_state: dict[str, Any]) -> None:
        self.turn_to(Turn.SAVE)
        ray.get([actor.save.remote(step, rollout_state) for actor in self._actors])

    def close(self) -> None:
        """Let the ranks take leave of the engines; what does not answer in time is left to its end."""
        try:
            ray.get([actor.close.remote() for actor in self._actors], timeout=CLOSE_TIMEOUT_SECONDS)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("a trainer rank did not close: %s", error)
