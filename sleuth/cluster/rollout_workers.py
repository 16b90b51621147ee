"""Rollout workers, each a Ray actor: hooks run in several processes, and so on several cores (`--rollout-workers`).

The rollout actor makes them and hands out samples; all else that a rollout is stays there. They end with it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sleuth.arguments import Args
from sleuth.cluster.lives import Lives
from sleuth.cluster.logs import configure_logging
from sleuth.cluster.ray_environment import passed_on
from sleuth.engine.key import engine_key, use_engine_key
from sleuth.metrics.memory import process_memory
from sleuth.metrics.progress import Report, Tally
from sleuth.paths import enter_working_folder
from sleuth.processes import ProcessName
from sleuth.rollout.collector import relax_garbage_collector
from sleuth.rollout.hook_runner import UNUSABLE
from sleuth.rollout.worker import Answer, Counts, Task, TrajectoryWorker, packed_task, unpacked
from sleuth.sample import Sample

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
"""Between two reports of how far a rollout is."""
ANSWER_SECONDS = 60.0
"""Within them a worker answers a question that costs it nothing, unless a hook keeps its event loop to itself."""


class RolloutWorkerDiedError(RuntimeError):
    """A rollout worker ended, and may not be started again."""


class WorkerActor:
    """Runs a `TrajectoryWorker` in a process of its own, in the event loop that Ray gives to such an actor."""

    def __init__(self, args: Args, run_dir: Path, index: int, key: str) -> None:
        enter_working_folder()
        configure_logging(run_dir, f"rollout_worker_{index}", args)
        use_engine_key(key)
        self.args, self.index = args, index

    async def load(self) -> ProcessName:
        """Load the hooks; returns which process this is."""
        self.worker = TrajectoryWorker(self.args, self.index)
        relax_garbage_collector()
        return ProcessName.of(os.getpid())

    async def connect(self, urls: list[str], router_url: str | None) -> None:
        self.worker.connect(urls, router_url)

    async def use_engines(self, urls: list[str]) -> None:
        self.worker.use_engines(urls)

    async def begin(self, what: str, total: int) -> None:
        self.worker.begin(what, total)

    async def end(self) -> None:
        self.worker.end()

    async def start(self, tasks: list[Task]) -> None:
        self.worker.start(tasks)

    async def collect(self) -> list[Answer]:
        return await self.worker.collect()

    async def take_counts(self) -> tuple[Counts, dict[str, float]]:
        """The counts, and this process's memory as metrics."""
        return self.worker.take_counts(), process_memory(f"rollout_worker_{self.index}")


class _WorkerGoneError(Exception):
    """The worker ended before it had answered."""


class _Worker:
    """One actor, and the samples that it has. Many samples travel in one call, for Ray's calls cost more than they do.

    All but the constructor is called in the manager's event loop.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._unsent: list[Task] = []
        self._collecting: asyncio.Task[None] | None = None

    async def answer(self, task: bytes) -> bytes:
        """The worker's answer to a task; _WorkerGoneError if it has ended, or what a hook raised to end the run."""
        loop = asyncio.get_running_loop()
        number, future = next(_numbers), loop.create_future()
        self._waiting[number] = future
        if not self._unsent:
            loop.call_soon(self._send)
        self._unsent.append((number, task))
        if self._collecting is None:
            self._collecting = loop.create_task(self._collect())
        try:
            answer: bytes = await future
            return answer
        finally:
            self._waiting.pop(number, None)

    def _send(self) -> None:
        self.actor.start.remote(self._unsent)
        self._unsent = []

    async def _collect(self) -> None:
        """Hand out answers as long as somebody waits for one."""
        try:
            while self._waiting:
                for number, answer in await self.actor.collect.remote():
                    future = self._waiting.pop(number, None)
                    if future is None or future.done():
                        continue
                    if isinstance(answer, bytes):
                        future.set_result(answer)
                    else:
                        future.set_exception(answer)
        except Exception as error:
            gone = _WorkerGoneError() if isinstance(error, ray.exceptions.RayActorError) else error
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(gone)
        finally:
            self._collecting = None


_numbers = itertools.count()


class RolloutWorkers:
    """The actors of all workers, as the manager's `WorkerPool`. All samples of a prompt go to the same one.

    One that ends is started again, as often as `--process-restarts` says; its samples are generated anew.
    """

    def __init__(self, args: Args, run_dir: Path, report: Report | None = None) -> None:
        """Start the processes; `report` is told every second how far a rollout is."""
        self.args, self.run_dir, self.report = args, run_dir, report
        self.memory: dict[str, float] = {}
        """The metrics of the workers' memory, as of the last counts."""
        self._lives = Lives(args.process_restarts)
        self._workers = [self._make(index) for index in range(args.rollout_workers)]
        self._loading = [worker.actor.load.remote() for worker in self._workers]
        self._engines: tuple[list[str], str | None] = ([], None)
        self._watched = ("rollout", 0)
        self._mending = asyncio.Lock()
        self._done = self._under_way = self._failed = self._tokens = 0

    def _make(self, index: int) -> _Worker:
        remote: Any = ray.remote
        # Where the rollout actor is: there a search server at 127.0.0.1 was found to answer.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        environment = {"env_vars": passed_on(os.environ)}
        options = {"num_cpus": 0, "scheduling_strategy": here, "runtime_env": environment}
        return _Worker(remote(WorkerActor).options(**options).remote(self.args, self.run_dir, index, engine_key()))

    def wait_until_loaded(self) -> list[ProcessName]:
        """Wait for the hooks in all of them; returns their processes. RolloutWorkerDiedError if one ends meanwhile."""
        try:
            processes: list[ProcessName] = ray.get(self._loading)
        except ray.exceptions.RayActorError as error:
            logs = self.run_dir / "logs" / "rollout_worker_*.log"
            raise RolloutWorkerDiedError(
                f"a rollout worker ended while it loaded the hooks: killed, or out of memory (its log: {logs}); start "
                "again, or lower --rollout-workers"
            ) from error
        return processes

    def connect(self, urls: Sequence[str], router_url: str | None) -> None:
        self._engines = (list(urls), router_url)
        ray.get([worker.actor.connect.remote(*self._engines) for worker in self._workers])

    def use_engines(self, urls: Sequence[str]) -> None:
        self._engines = (list(urls), self._engines[1])
        for worker in self._workers:  # nobody waits for one that has ended
            worker.actor.use_engines.remote(list(urls))

    def take_counts(self) -> list[Counts]:
        """What each worker counted; one that has ended, or does not answer, is left out."""
        asked = [worker.actor.take_counts.remote() for worker in self._workers]
        done, late = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_SECONDS)
        found: list[Counts] = []
        self.memory = {}
        for answer in done:
            with suppress(ray.exceptions.RayActorError):
                counts, memory = ray.get(answer)
                found.append(counts)
                self.memory |= memory
        if late:
            logger.warning(
                "%d rollout workers did not answer for %g s: the step's metrics lack what they counted",
                *(len(late), ANSWER_SECONDS),
            )
        return found

    async def run(self, sample: Sample, params: dict[str, Any], evaluation: bool) -> tuple[Sample, bytes | None]:
        task = packed_task(sample, params, evaluation)
        self._under_way += 1
        try:
            done, entry = unpacked(await self._answer(sample.group_index % len(self._workers), task))
        finally:
            self._under_way -= 1
        self._tokens += sum(done.trace.loss_mask)
        if done.status in UNUSABLE:
            self._failed += 1
        else:
            self._done += 1
        return done, entry

    async def _answer(self, index: int, task: bytes) -> bytes:
        while True:
            worker = self._workers[index]
            try:
                return await worker.answer(task)
            except _WorkerGoneError:
                async with self._mending:
                    if self._workers[index] is worker:
                        with suppress(ray.exceptions.RayActorError):  # the next attempt finds it
                            await self._start_again(index)

    async def _start_again(self, index: int) -> None:
        log = self.run_dir / "logs" / f"rollout_worker_{index}.log"
        ended = f"rollout worker {index} ended: killed, or out of memory (its log: {log})"
        number = self._lives.use(index)
        if number is None:
            raise RolloutWorkerDiedError(f"{ended}; it may not be started again (--process-restarts); start again")
        logger.warning(
            "%s; it is started again, and its samples are generated anew (%d of at most %d times)",
            *(ended, number, self._lives.allowed),
        )
        ray.kill(self._workers[index].actor)  # it may only be out of reach
        worker = self._make(index)
        actor = worker.actor
        await actor.load.remote()
        await actor.connect.remote(*self._engines)
        await actor.begin.remote(*self._watched)
        self._workers[index] = worker
        actor.use_engines.remote(self._engines[0])  # they may have changed meanwhile

    @contextmanager
    def watching(self, what: str, total: int) -> Iterator[None]:
        self._watched = (what, total)
        self._done = self._failed = self._tokens = 0
        for worker in self._workers:
            worker.actor.begin.remote(what, total)
        reporting = asyncio.create_task(self._reports(what, total))
        try:
            yield
        finally:
            reporting.cancel()
            for worker in self._workers:
                worker.actor.end.remote()

    async def _reports(self, what: str, total: int) -> None:
        started = time.monotonic()
        while self.report is not None:
            await asyncio.sleep(BEAT_SECONDS)
            speed = self._tokens / (time.monotonic() - started)
            failed = f", {self._failed} failed" if self._failed else ""
            notes = f"{self._under_way} in flight, {speed:,.0f} tokens/s of finished ones{failed}"
            self.report(Tally(self._done, total, "trajectories", notes, what))

    def note_taken(self) -> None:
        self._done += 1
