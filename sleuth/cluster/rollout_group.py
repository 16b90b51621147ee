"""The part of a run that makes its data: the rollout manager, a Ray actor, and the engines that it uses.

The batches of a step never pass through the driver: the actor puts the share of each data-parallel rank into Ray's
object store, and each rank fetches its share from there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sleuth.arguments import Args
from sleuth.cluster.engines import Engines
from sleuth.cluster.logs import configure_logging
from sleuth.cluster.memory_turns import Turn
from sleuth.cluster.placement import Placement
from sleuth.cluster.ray_environment import passed_on
from sleuth.cluster.waiting import Wait, Waiter
from sleuth.engine.key import engine_key, use_engine_key
from sleuth.metrics.memory import process_memory
from sleuth.paths import enter_working_folder
from sleuth.processes import ProcessName
from sleuth.rollout.collector import relax_garbage_collector
from sleuth.rollout.manager import RolloutManager, SupervisedManager
from sleuth.rollout.replay import ReplayManager

ROLLOUT = Wait("rollout", tells_time=False)
"""The actor itself tells how far it is; each trajectory has its limits."""


@dataclass(frozen=True, slots=True)
class StepRefs:
    """References to the data of one step in Ray's object store, and the step's metrics.

    `shards[data-parallel rank]` refers to the list[OptimizerStepBatch] of that rank. The rollout actor owns the
    objects: they exist as long as it runs and someone holds the references.
    """

    shards: list[ray.ObjectRef]
    metrics: dict[str, float]


def make_manager(args: Args, run_dir: Path) -> RolloutManager | SupervisedManager | ReplayManager:
    """The manager for `args`: samples come from engines, from finished trajectories, or from a journal."""
    if args.loss_type == "sft":
        return SupervisedManager(args)
    return ReplayManager(args) if args.debug_train_only else RolloutManager(args, run_dir)


class RolloutActor:
    """Runs the manager in a process of its own."""

    def __init__(self, args: Args, run_dir: Path, engine_key: str) -> None:
        enter_working_folder()
        configure_logging(run_dir, "rollout", args)
        use_engine_key(engine_key)
        self.args, self.run_dir = args, run_dir

    def process(self) -> ProcessName:
        return ProcessName.of(os.getpid())

    def load(self) -> None:
        """Load data and hooks. The constructor does not: Ray would wrap a user's error there in one of its own."""
        self.manager = make_manager(self.args, self.run_dir)
        relax_garbage_collector()

    def connect(self, engine_urls: list[str], state: dict[str, Any], router_url: str | None) -> list[int]:
        """Connect to the engines and restore the state of a checkpoint; returns the probe's token ids."""
        self.manager.connect(engine_urls, state, router_url)
        return self.manager.probe_ids()

    def generate(self, step: int) -> StepRefs:
        data = self.manager.generate(step)
        return StepRefs([ray.put(shard) for shard in data.shards], data.metrics | process_memory("rollout"))

    def evaluate(self, step: int) -> dict[str, float]:
        return self.manager.evaluate(step)

    def probe_engines(self) -> list[list[float]]:
        return self.manager.probe_engines()

    def state_dict(self) -> dict[str, Any]:
        return self.manager.state_dict()


class RolloutGroup:
    """Manager and engines behind one object; in a supervised run there are no engines. `waiter` waits for them."""

    def __init__(self, args: Args, run_dir: Path, placement: Placement, waiter: Waiter) -> None:
        self.waiter = waiter
        actor: Any = ray.remote(RolloutActor)
        # On the driver's node: there are the data, and there a search server at 127.0.0.1 was found to answer.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": here, "runtime_env": {"env_vars": passed_on(os.environ)}}
        self._manager = actor.options(**options).remote(args, run_dir, engine_key())
        self._loading = self._manager.load.remote()
        self.engines = Engines(args, run_dir, placement, waiter)
        self.turn_to: Callable[[Turn], None] = lambda turn: None  # see `share_memory`
        self.meanwhile: Callable[[], None] = lambda: None  # done every few seconds while engines generate
        self.engine_urls: list[str] = []
        self.probe_ids: list[int] = []

    def wait_until_loaded(self) -> None:
        """Wait for data and hooks, while engines and trainer still start; ValueError if something in them is wrong."""
        self.waiter.watch("the rollout", ray.get(self._manager.process.remote()))
        self.waiter.one(self._loading, Wait("loading data and hooks"))

    def wait_until_ready(self, state: dict[str, Any]) -> None:
        """Wait for the engines, and go on from the state of the checkpoint."""
        self.engine_urls = self.engines.wait_until_ready()
        connected = self._manager.connect.remote(self.engine_urls, state, self.engines.router_url)
        self.probe_ids = self.waiter.one(connected, Wait("connecting to the engines"))

    def generate(self, step: int) -> StepRefs:
        with self.deaths_explained():
            self.waiter.prefix = f"step {step}: "
            self.turn_to(Turn.GENERATE)
            data: StepRefs = self.waiter.one(self._manager.generate.remote(step), ROLLOUT, self.meanwhile)
            data.metrics.update(self.engines.memory())
            return data

    def evaluate(self, step: int) -> dict[str, float]:
        with self.deaths_explained():
            self.waiter.prefix = f"evaluation after step {step}: "
            self.turn_to(Turn.GENERATE)
            return self.waiter.one(self._manager.evaluate.remote(step), ROLLOUT, self.meanwhile)

    def probe_engines(self) -> list[list[float]]:
        """Each engine's log-probabilities (nats, temperature 1) of `probe_ids` after the first."""
        self.turn_to(Turn.GENERATE)
        return self.waiter.one(self._manager.probe_engines.remote(), Wait("asking the engines for the probe's scores"))

    @contextmanager
    def deaths_explained(self) -> Iterator[None]:
        """See `Engines.deaths_explained`."""
        with self.engines.deaths_explained():
            yield

    def state_dict(self) -> dict[str, Any]:
        return self.waiter.one(self._manager.state_dict.remote(), Wait("asking for the rollout's state"))

    def close(self) -> None:
        ray.kill(self._manager)  # first: its requests under way must not complain of engines that go
        self.engines.stop()
