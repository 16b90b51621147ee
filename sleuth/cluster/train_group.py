"""The ranks of the trainer, each a Ray actor, behind one object."""

from __future__ import annotations

import logging
import os
from collections import ChainMap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from torch.distributed import TCPStore

from sleuth.algo.optimizer_steps import OptimizerStepBatch
from sleuth.arguments import Args
from sleuth.cluster import board
from sleuth.cluster.logs import configure_logging
from sleuth.cluster.memory_turns import Turn
from sleuth.cluster.placement import Placement
from sleuth.cluster.waiting import Wait, Waiter
from sleuth.engine.devices import check_granted
from sleuth.engine.key import engine_key, use_engine_key
from sleuth.interfaces import gloo_interface
from sleuth.meeting import join_meeting, open_meeting
from sleuth.metrics.memory import GB, gpu_memory, process_memory
from sleuth.metrics.speed import peak_tflops
from sleuth.metrics.trajectories import step_trajectories, write_trainer_log_probs
from sleuth.paths import enter_working_folder
from sleuth.processes import ProcessName
from sleuth.weight_sync.control import AFTERMATH_SECONDS
from sleuth.weight_sync.sources import Source

if TYPE_CHECKING:
    from sleuth.megatron.lending import Part

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_SECONDS = 30.0


class TrainActor:
    """One rank of the Megatron trainer."""

    def __init__(
        self,
        args: Args,
        run_dir: Path,
        rank: int,
        world_size: int,
        gpu_id: str | None,
        sources: Sequence[Source],
        engine_key: str,
        host: str,
    ) -> None:
        """`host`: the address by which the other ranks reach this one."""
        enter_working_folder()
        configure_logging(run_dir, f"trainer_{rank}", args)
        use_engine_key(engine_key)
        self.args, self.run_dir, self.rank, self.world_size = args, run_dir, rank, world_size
        self._store: TCPStore | None = None
        self.gpu_ids = [] if gpu_id is None else [gpu_id]
        self.sources = sources
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0")  # of the one GPU that it sees
        os.environ.update(gloo_interface(host, os.environ))

    def process(self) -> ProcessName:
        return ProcessName.of(os.getpid())

    def rendezvous(self) -> tuple[str, int]:
        """Open the place at which the ranks' process group meets; returns its address and port."""
        self._store = open_meeting(ray.util.get_node_ip_address(), self.world_size)
        return self._store.host, self._store.port

    def start(self, address: str, port: int) -> tuple[int, dict[str, Any]]:
        """Build or load model and optimizer; return the steps done so far and the rollout's state."""
        check_granted(self.gpu_ids)
        if self._store is None:
            self._store = join_meeting(address, port, self.world_size)
        from sleuth.cluster.push import WeightPush  # megatron needs RANK and the like in the environment
        from sleuth.megatron.trainer import Trainer

        self.trainer = Trainer(self.args, self._store)
        if self.rank == 0:
            self.trainer.passes.report = board.TRAINING.post
        self._push = WeightPush(self.args, self.run_dir, self.trainer, self.sources)
        return self.trainer.steps_done, self.trainer.rollout_state

    def train(self, shards: Sequence[ray.ObjectRef]) -> tuple[dict[str, float], dict[int, list[float | None]]]:
        """Fetch this rank's share, and no other, and train on it; metrics, and log-probabilities of logged samples."""
        shard: list[OptimizerStepBatch] = ray.get(shards[self.trainer.data_parallel_rank])
        metrics = self.trainer.train(shard) | self._device_metrics()
        return metrics, self.trainer.logged_log_probs

    def _device_metrics(self) -> dict[str, float]:
        """This rank's memory; on a GPU also the most that its tensors took, and what the GPU can do at most."""
        import torch

        name = f"trainer_{self.rank}"
        metrics = process_memory(name)
        if self.gpu_ids:
            metrics[f"perf/gpu_memory_peak/{name}"] = torch.cuda.max_memory_allocated() / GB
            torch.cuda.reset_peak_memory_stats()
            metrics |= gpu_memory(name, self.gpu_ids)
            if peak := peak_tflops(torch.cuda.get_device_name()):
                metrics["perf/train_peak_tflops"] = peak
        return metrics

    def lend(self, parts: tuple[Part, ...]) -> None:
        self.trainer.memory.lend(parts)

    def take_back(self, parts: tuple[Part, ...]) -> None:
        self.trainer.memory.take_back(parts)

    def score(self, token_ids: list[int]) -> list[float]:
        return self.trainer.log_probs(token_ids, temperature=1.0)

    def push_weights(self, engine_urls: list[str], version: str, engines: list[int] | None = None) -> None:
        """Take part in sending the weights to all engines, or to those with these numbers."""
        self._push.push(engine_urls, version, engines)

    def save(self, step: int, rollout_state: dict[str, Any]) -> None:
        self.trainer.save(step, rollout_state)

    def finish_save(self, wait: bool) -> bool:
        return self.trainer.finish_save(wait=wait)

    def close(self) -> None:
        """Take leave of the engines."""
        self._push.close()


class TrainGroup:
    """All ranks of the trainer. `waiter` waits for them."""

    def __init__(self, args: Args, run_dir: Path, placement: Placement, waiter: Waiter) -> None:
        self.args, self.run_dir, self.waiter = args, run_dir, waiter
        remote: Any = ray.remote(TrainActor)
        env = {"TORCHDYNAMO_DISABLE": "1"} if placement.trainer[0].gpu_id is None else {}
        world_size = len(placement.trainer)
        sources = placement.sources(args.rollout_num_gpus_per_engine)
        self._actors = [
            remote.options(**placement.options(device, env)).remote(
                args, run_dir, rank, world_size, device.gpu_id, sources, engine_key(), placement.host(device.node_ip)
            )
            for rank, device in enumerate(placement.trainer)
        ]
        self.turn_to: Callable[[Turn], None] = lambda turn: None  # see `share_memory`
        address, port = ray.get(self._actors[0].rendezvous.remote())
        self._processes = [actor.process.remote() for actor in self._actors]  # before what one of them may wait in
        self._start = [actor.start.remote(address, port) for actor in self._actors]

    def wait_until_ready(self) -> tuple[int, dict[str, Any]]:
        """Steps done so far (0 in a new run) and the rollout state of the checkpoint ({} in a new run)."""
        for rank, process in enumerate(ray.get(self._processes)):
            self.waiter.watch(f"trainer rank {rank}", process)
        return self._wait(self._start, "starting the trainer", limited=False)[0]

    def _wait(
        self, references: list[ray.ObjectRef], what: str, *, limited: bool = True, noted: board.Board | None = None
    ) -> list[Any]:
        limit = self.args.train_timeout if limited else None
        return self.waiter.get(references, Wait(what, limit, "--train-timeout", noted))

    def train(self, step: int, shards: list[ray.ObjectRef]) -> dict[str, float]:
        """Train on the data of `step`, `shards[data-parallel rank]`; the metrics of rank 0, and each rank's memory.

        The trainer's log-probabilities of the trajectories that are logged are written beside them.
        """
        self.turn_to(Turn.TRAIN)
        ranks = self._wait([actor.train.remote(shards) for actor in self._actors], "training", noted=board.TRAINING)
        logged = dict(ChainMap(*(log_probs for _, log_probs in ranks)))
        if logged:
            write_trainer_log_probs(step_trajectories(self.run_dir, step), [logged[index] for index in sorted(logged)])
        return dict(ChainMap(*(metrics for metrics, _ in ranks)))

    def lend(self, parts: tuple[Part, ...]) -> None:
        """Free the memory of these parts on every rank's device."""
        self._wait([actor.lend.remote(parts) for actor in self._actors], "moving the trainer out of the GPU")

    def take_back(self, parts: tuple[Part, ...]) -> None:
        """Bring back what was lent."""
        self._wait([actor.take_back.remote(parts) for actor in self._actors], "moving the trainer into the GPU")

    def push_weights(self, engine_urls: list[str], version: str, engines: list[int] | None = None) -> None:
        """Send the weights to the engines at these URLs: all of them, or those with the numbers `engines`."""
        self.turn_to(Turn.SYNC)
        sent = [actor.push_weights.remote(engine_urls, version, engines) for actor in self._actors]
        # An update that takes too long fails by itself, with the engine's name, unless a trainer process is stuck.
        limit = self.args.sync_timeout + AFTERMATH_SECONDS * 2
        self.waiter.get(sent, Wait(f"sending weights {version} to the engines", limit, "--sync-timeout and a minute:"))

    def score(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities (nats, temperature 1) of each id but the first."""
        return self._wait([actor.score.remote(token_ids) for actor in self._actors], "scoring the probe")[0]

    def save(self, step: int, rollout_state: dict[str, Any]) -> None:
        """Begin to save; `finish_save` ends it. An earlier save is finished first."""
        self.turn_to(Turn.SAVE)
        self._wait([actor.save.remote(step, rollout_state) for actor in self._actors], "saving")

    def finish_save(self, *, wait: bool) -> bool:
        """Publish the checkpoint that was begun; without `wait`, only if it is written. Whether that is done."""
        return self._wait([actor.finish_save.remote(wait) for actor in self._actors], "writing the checkpoint")[0]

    def close(self) -> None:
        """Let the ranks take leave of the engines; what does not answer in time is left to its end."""
        try:
            ray.get([actor.close.remote() for actor in self._actors], timeout=CLOSE_TIMEOUT_SECONDS)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("a trainer rank did not close: %s", error)
