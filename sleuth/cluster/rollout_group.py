"""The part of a run that makes its data: the rollout manager, a Ray actor, and the engines that it uses.

The batches of a step never pass through the driver: the actor puts the share of each data-parallel rank into Ray's
object store, and each rank fetches its share from there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sleuth.arguments import Args
from sleuth.cluster import board
from sleuth.cluster.engines import Engines
from sleuth.cluster.lives import Lives
from sleuth.cluster.logs import configure_logging
from sleuth.cluster.memory_turns import Turn
from sleuth.cluster.placement import Placement
from sleuth.cluster.ray_environment import passed_on
from sleuth.cluster.rollout_workers import RolloutWorkers
from sleuth.cluster.waiting import Wait, Waiter
from sleuth.engine.key import engine_key, use_engine_key
from sleuth.metrics.memory import process_memory
from sleuth.paths import enter_working_folder
from sleuth.processes import ProcessName
from sleuth.rollout.collector import relax_garbage_collector
from sleuth.rollout.manager import RolloutManager, SupervisedManager
from sleuth.rollout.replay import ReplayManager

logger = logging.getLogger(__name__)

ASIDE = "aside"
"""The concurrency group of calls that the rollout actor takes while it is busy."""
LOOK_SECONDS = 10.0
"""Between two looks at the engines, while they generate."""
ROLLOUT = Wait("rollout", board=board.ROLLOUT)
"""Without a limit: each trajectory has its own."""


@dataclass(frozen=True, slots=True)
class StepRefs:
    """References to the data of one step in Ray's object store, the step's metrics, and the rollout's state after it.

    `shards[data-parallel rank]` refers to the list[OptimizerStepBatch] of that rank. The rollout actor owns the
    objects: they exist as long as it runs and someone holds the references.
    """

    shards: list[ray.ObjectRef]
    metrics: dict[str, float]
    state: dict[str, Any]


def make_manager(
    args: Args, run_dir: Path, workers: RolloutWorkers | None
) -> RolloutManager | SupervisedManager | ReplayManager:
    """The manager for `args`: samples come from engines, from finished trajectories, or from a journal."""
    if args.loss_type == "sft":
        return SupervisedManager(args)
    return ReplayManager(args) if args.debug_train_only else RolloutManager(args, run_dir, board.ROLLOUT.post, workers)


class RolloutActor:
    """Runs the manager in a process of its own."""

    def __init__(self, args: Args, run_dir: Path, engine_key: str) -> None:
        enter_working_folder()
        configure_logging(run_dir, "rollout", args)
        use_engine_key(engine_key)
        self.args, self.run_dir = args, run_dir

    def process(self) -> ProcessName:
        return ProcessName.of(os.getpid())

    def load(self) -> list[ProcessName]:
        """Load data and hooks; returns the processes of the workers, if there are any.

        The constructor does not: Ray would wrap a user's error there in one of its own.
        """
        workers = None
        if not self.args.without_engines and self.args.rollout_workers > 1:
            workers = RolloutWorkers(self.args, self.run_dir, board.ROLLOUT.post)
        self.workers = workers
        self.manager = make_manager(self.args, self.run_dir, workers)
        relax_garbage_collector()
        return [] if workers is None else workers.wait_until_loaded()

    def connect(
        self, engine_urls: list[str], state: dict[str, Any], router_url: str | None, again: bool = False
    ) -> list[int]:
        """Connect to the engines and restore the state of a checkpoint; returns the probe's token ids.

        `again`: in the middle of a run.
        """
        self.manager.connect(engine_urls, state, router_url, again=again)
        return self.manager.probe_ids()

    def use_engines(self, engine_urls: list[str]) -> None:
        """Use these engines from now on. It is called in another thread than all else, while a rollout is under way."""
        self.manager.use_engines(engine_urls)

    def generate(self, step: int) -> StepRefs:
        data = self.manager.generate(step)
        shards = [ray.put(shard) for shard in data.shards]
        # The state comes along: a process that took this one's place would say how it was before the step.
        memory = process_memory("rollout") | ({} if self.workers is None else self.workers.memory)
        return StepRefs(shards, data.metrics | memory, self.manager.state_dict())

    def evaluate(self, step: int) -> dict[str, float]:
        return self.manager.evaluate(step)

    def probe_engines(self) -> list[list[float]]:
        return self.manager.probe_engines()


class RolloutGroup:
    """Manager and engines behind one object; in a supervised run there are no engines. `waiter` waits for them."""

    def __init__(self, args: Args, run_dir: Path, placement: Placement, waiter: Waiter) -> None:
        self.args, self.run_dir, self.waiter = args, run_dir, waiter
        self._lives = Lives(args.process_restarts)
        self._state: dict[str, Any] = {}
        self._start_manager()
        self.engines = Engines(args, run_dir, placement, waiter)
        self.turn_to: Callable[[Turn], None] = lambda turn: None  # see `share_memory`
        self.meanwhile: Callable[[], None] = lambda: None  # done every few seconds while engines generate
        self.send_weights: Callable[[list[str], list[int]], None] = lambda urls, engines: None  # of the trainer
        self._next_look = 0.0
        self.engine_urls: list[str] = []
        self.probe_ids: list[int] = []

    def _start_manager(self) -> None:
        remote: Any = ray.remote
        actor = remote(concurrency_groups={ASIDE: 1})(RolloutActor)
        # On the driver's node: there are the data, and there a search server at 127.0.0.1 was found to answer.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": here, "runtime_env": {"env_vars": passed_on(os.environ)}}
        self._manager = actor.options(**options).remote(self.args, self.run_dir, engine_key())
        self._process = self._manager.process.remote()  # before what may take long
        self._loading = self._manager.load.remote()

    def wait_until_loaded(self) -> None:
        """Wait for data and hooks, while engines and trainer still start; ValueError if something in them is wrong."""
        self.waiter.watch("the rollout", ray.get(self._process))
        workers = self.waiter.one(self._loading, Wait("loading data and hooks"))
        for index, process in enumerate(workers):
            self.waiter.watch(f"rollout worker {index}", process)

    def wait_until_ready(self, state: dict[str, Any]) -> None:
        """Wait for the engines, and go on from the state of the checkpoint."""
        self.engine_urls = self.engines.wait_until_ready()
        self._state = state
        self._connect()

    def _connect(self, *, again: bool = False) -> None:
        connected = self._manager.connect.remote(self.engine_urls, self._state, self.engines.router_url, again)
        self.probe_ids = self.waiter.one(connected, Wait("connecting to the engines"))

    def generate(self, step: int) -> StepRefs:
        with self.deaths_explained():
            self.waiter.prefix = f"step {step}: "
            self.turn_to(Turn.GENERATE)
            data: StepRefs = self._ask("generate", step, wait=ROLLOUT, meanwhile=self._tend)
            self._state = data.state
            data.metrics.update(self.engines.memory())
            return data

    def evaluate(self, step: int) -> dict[str, float]:
        with self.deaths_explained():
            self.waiter.prefix = f"evaluation after step {step}: "
            self.turn_to(Turn.GENERATE)
            found: dict[str, float] = self._ask("evaluate", step, wait=ROLLOUT, meanwhile=self._tend)
            return found

    def probe_engines(self) -> list[list[float]]:
        """Each engine's log-probabilities (nats, temperature 1) of `probe_ids` after the first."""
        self.turn_to(Turn.GENERATE)
        scores: list[list[float]] = self._ask("probe_engines", wait=Wait("asking the engines for the probe's scores"))
        return scores

    def _ask(self, what: str, *values: Any, wait: Wait, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """What the manager answers; where its process ends, it is started again, and asked again."""
        while True:
            try:
                return self.waiter.one(getattr(self._manager, what).remote(*values), wait, meanwhile)
            except ray.exceptions.RayActorError as error:
                if not self._has_ended(error) or (number := self._lives.use("rollout")) is None:
                    raise
                logger.warning(
                    "the rollout process ended: killed, or out of memory (its log: %s); it is started again, and %s "
                    "done anew (%d of at most %d times)",
                    *(self.run_dir / "logs" / "rollout.log", wait.what, number, self._lives.allowed),
                )
            self._start_manager()
            self.wait_until_loaded()
            self._connect(again=True)

    def _has_ended(self, error: ray.exceptions.RayActorError) -> bool:
        """Whether the error says that the manager's process ended, and not another one's."""
        return not isinstance(error, ray.exceptions.RayTaskError) and error.actor_id == self._manager._actor_id.hex()

    def _tend(self) -> None:
        self.meanwhile()
        if time.monotonic() >= self._next_look:
            self.revive()
            self._next_look = time.monotonic() + LOOK_SECONDS

    def revive(self, *, with_weights: bool = True) -> bool:
        """Start engines again that are lost, and whether there were any; meanwhile the others do their work.

        `with_weights`: send them the trainer's weights, before they get requests.
        """
        lost = self.engines.lost()
        if not lost:
            return False
        self._use([url for index, url in enumerate(self.engine_urls) if index not in lost])
        self.engine_urls = self.engines.start_again(lost)
        if with_weights:
            self.send_weights([self.engine_urls[index] for index in lost], list(lost))
        self._use(self.engine_urls)
        return True

    def _use(self, urls: list[str]) -> None:
        told = self._manager.use_engines.options(concurrency_group=ASIDE).remote(urls)
        self.waiter.one(told, Wait("telling the rollout of its engines"))

    @contextmanager
    def deaths_explained(self) -> Iterator[None]:
        """See `Engines.deaths_explained`."""
        with self.engines.deaths_explained():
            yield

    def state_dict(self) -> dict[str, Any]:
        """The rollout's state after the step that was last generated."""
        return self._state

    def close(self) -> None:
        ray.kill(self._manager)  # first: its requests under way must not complain of engines that go
        self.engines.stop()
