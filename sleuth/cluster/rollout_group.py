"""The engines and the rollout manager as Ray actors, spoken to as one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from sleuth.arguments import Args
from sleuth.cluster.logs import configure_logging
from sleuth.cluster.placement import Device, Placement
from sleuth.cluster.train_group import TrainGroup
from sleuth.engine.actor import EngineActor
from sleuth.engine.server import EngineConfig
from sleuth.rollout.collector import relax_garbage_collector
from sleuth.rollout.manager import RolloutManager, StepData, SupervisedManager

logger = logging.getLogger(__name__)

STOP_TIMEOUT_SECONDS, STOP_TIMEOUT_SECONDS_ON_GPU = 10.0, 30.0
ENGINE_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Ray kills the children of an actor that ends, though not theirs: the engine's own watch ends all of them."""


class RolloutActor:
    """The rollout manager in a process of its own."""

    def __init__(self, args: Args, run_dir: Path) -> None:
        configure_logging(run_dir, "rollout")
        self.args, self.run_dir = args, run_dir

    def load(self) -> None:
        """Not in the constructor: there Ray would wrap a user's error in one of its own."""
        self.manager = RolloutManager(self.args, self.run_dir)
        relax_garbage_collector()

    def connect(self, engine_urls: list[str], state: dict[str, Any]) -> list[int]:
        """Connect to the engines; returns the probe's token ids."""
        self.manager.connect(engine_urls, state)
        return self.manager.probe_ids()

    def generate(self, step: int) -> StepData:
        return self.manager.generate(step)

    def evaluate(self, step: int) -> dict[str, float]:
        return self.manager.evaluate(step)

    def probe_engines(self) -> list[list[float]]:
        return self.manager.probe_engines()

    def state_dict(self) -> dict[str, Any]:
        return self.manager.state_dict()


class SyncError(RuntimeError):
    """The engines do not compute what the trainer computes."""


class EngineDiedError(RuntimeError):
    """An engine ended, or stopped to answer, in the middle of a run."""


class RolloutGroup:
    """Engines and manager of a run that generates its data."""

    def __init__(self, args: Args, run_dir: Path, placement: Placement) -> None:
        self.args, self.run_dir = args, run_dir
        manager: Any = ray.remote(RolloutActor)
        self._manager = manager.options(num_cpus=0).remote(args, run_dir)
        self._loading = self._manager.load.remote()
        per_engine = args.rollout_num_gpus_per_engine
        remote: Any = ray.remote(EngineActor)
        firsts = placement.engines[::per_engine]
        self._engines = [
            # Two calls at a time: an engine that still starts can be stopped.
            remote.options(**placement.options(device, ENGINE_ENVIRONMENT), max_concurrency=2).remote(
                engine_config(args, run_dir, index, device)
            )
            for index, device in enumerate(firsts)
        ]
        self._on_gpu = firsts[0].gpu_id is not None
        self._starting = [engine.start.remote() for engine in self._engines]

    def wait_until_loaded(self) -> None:
        """Raises ValueError for data or hooks that do not fit, while engines and trainer still start."""
        ray.get(self._loading)

    def wait_until_ready(self, state: dict[str, Any]) -> None:
        """Wait for the engines, and go on from the state of the checkpoint."""
        self.urls: list[str] = ray.get(self._starting)
        self._probe_ids: list[int] = ray.get(self._manager.connect.remote(self.urls, state))

    def generate(self, step: int) -> StepData:
        with self._explain_dead_engines():
            return ray.get(self._manager.generate.remote(step))

    def evaluate(self, step: int) -> dict[str, float]:
        with self._explain_dead_engines():
            return ray.get(self._manager.evaluate.remote(step))

    def sync_weights(self, trainer: TrainGroup, version: int) -> dict[str, float]:
        """Send the trainer's weights to every engine, then check that both compute the same.

        Returns the largest difference of log-probabilities over a fixed probe, in nats. Raises
        SyncError when it exceeds `--max-logprob-diff`.
        """
        with self._explain_dead_engines():
            trainer.push_weights(self.urls, str(version))
            expected = trainer.log_probs(self._probe_ids)
            found_by_engine = ray.get(self._manager.probe_engines.remote())
        difference = max(
            abs(found - wanted)
            for log_probs in found_by_engine
            for found, wanted in zip(log_probs, expected, strict=True)
        )
        limit = self.args.max_logprob_diff
        if limit is not None and not difference <= limit:  # also true for NaN
            raise SyncError(
                f"after weight update {version} an engine's log-probabilities differ from the trainer's by "
                f"{difference:.2e} nats; expected at most --max-logprob-diff {limit:.2e}. "
                "The engine holds other weights, or computes in another precision (--sglang-dtype)"
            )
        return {"train/rollout_logprob_abs_diff": difference}

    @contextmanager
    def _explain_dead_engines(self) -> Iterator[None]:
        """Where something fails because an engine is dead, say that instead of what followed from it."""
        try:
            yield
        except ray.exceptions.RayError as error:
            found = ray.get([engine.trouble.remote() for engine in self._engines])
            troubles = [f"engine {index}: {trouble}" for index, trouble in enumerate(found) if trouble]
            if not troubles:
                raise
            remedy = "start again"
            if self.args.save:
                remedy += f"; --load {self.args.save} goes on from the last checkpoint"
            raise EngineDiedError(f"{'; '.join(troubles)}; {remedy}") from error

    def release_memory(self) -> None:
        """Give the devices to the trainer (colocated on GPUs; on a CPU memory is not scarce)."""
        if self.args.colocate and self._on_gpu:
            ray.get([engine.release_memory.remote(lent_memory(self.args)) for engine in self._engines])

    def resume_memory(self) -> None:
        if self.args.colocate and self._on_gpu:
            ray.get([engine.resume_memory.remote(lent_memory(self.args)) for engine in self._engines])

    def state_dict(self) -> dict[str, Any]:
        return ray.get(self._manager.state_dict.remote())

    def close(self) -> None:
        """Stop the engines; what does not stop in time dies with its actor."""
        try:
            ray.kill(self._manager)  # first: its requests under way must not complain of engines that go
            timeout = STOP_TIMEOUT_SECONDS_ON_GPU if self._on_gpu else STOP_TIMEOUT_SECONDS
            ray.get([engine.stop.remote() for engine in self._engines], timeout=timeout)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("an engine did not stop by itself: %s", error)


def lent_memory(args: Args) -> tuple[str, ...] | None:
    """What engines give to the trainer; None: all. Weights that are given are lost, so only before every sync."""
    return None if args.update_weights_interval == 1 else ("kv_cache", "cuda_graph")


def engine_config(args: Args, run_dir: Path, index: int, device: Device) -> EngineConfig:
    """How engine `index` is started, its first GPU being `device`."""
    return EngineConfig(
        model_path=args.hf_checkpoint,
        seed=args.seed + index,
        dtype=args.sglang_dtype or args.dtype,
        log_path=run_dir / "logs" / f"engine_{index}.log",
        context_length=args.rollout_max_context_len,
        max_total_tokens=args.sglang_max_total_tokens,
        max_running_requests=args.rollout_max_concurrency,
        tensor_parallel_size=args.rollout_num_gpus_per_engine,
        base_gpu_id=device.gpu_id or 0,
        mem_fraction_static=args.sglang_mem_fraction_static,
        enable_memory_saver=args.colocate,
    )


class SupervisedGroup:
    """The same interface for supervised training: data come from a file, there is no engine."""

    def __init__(self, args: Args) -> None:
        self._manager = SupervisedManager(args)

    def wait_until_loaded(self) -> None:
        """The constructor has loaded everything."""

    def wait_until_ready(self, state: dict[str, Any]) -> None:
        self._manager.restore(state)

    def generate(self, step: int) -> StepData:
        return self._manager.generate(step)

    def evaluate(self, step: int) -> dict[str, float]:
        return {}

    def sync_weights(self, trainer: TrainGroup, version: int) -> dict[str, float]:
        return {}

    def release_memory(self) -> None:
        """There is no engine."""

    def resume_memory(self) -> None:
        """There is no engine."""

    def state_dict(self) -> dict[str, Any]:
        return self._manager.state_dict()

    def close(self) -> None:
        """There is no engine."""
