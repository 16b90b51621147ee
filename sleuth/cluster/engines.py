"""All engines of a run, each in a Ray actor, behind one object: starts them, lends their memory, reports deaths, ends.

Their weights come from `sleuth.cluster.sync`; `sleuth.cluster.rollout_group` has them generate.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from sleuth.arguments import Args
from sleuth.cluster.lives import Lives
from sleuth.cluster.memory_turns import ENGINE_PARTS
from sleuth.cluster.placement import Device, Placement
from sleuth.cluster.waiting import Wait, Waiter
from sleuth.engine.actor import EngineActor
from sleuth.engine.key import engine_key
from sleuth.engine.option_names import option_words
from sleuth.engine.router import RouterProcess
from sleuth.engine.server import HOST, EngineConfig
from sleuth.engine.spanning_actor import SpanningEngineActor
from sleuth.weight_sync.control import EngineGroup

logger = logging.getLogger(__name__)

STOP_TIMEOUT_SECONDS, STOP_TIMEOUT_SECONDS_ON_GPU = 10.0, 30.0
ENGINE_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Ray kills the children of an actor that ends, though not theirs: the engine's own watch ends all of them."""


CALLS_AT_A_TIME = 3
LOOK_SECONDS = 8.0
"""Within them an engine's actor says how the engine is."""


class EngineDiedError(RuntimeError):
    """An engine, or the router, ended or stopped answering in the middle of a run."""


class Engines:
    """The actors of all engines. A supervised run has none, and every method then does nothing.

    They start at once, unless they share GPUs with a trainer: then they measure how much memory is free, and
    `wait_until_ready` starts them, when the trainer has lent its own.
    """

    def __init__(self, args: Args, run_dir: Path, placement: Placement, waiter: Waiter) -> None:
        self.args, self.waiter = args, waiter
        shares = placement.engine_shares(args.rollout_num_gpus_per_engine)
        self._make = [partial(_make_actor, args, run_dir, placement, *item) for item in enumerate(shares)]
        self._actors = [make() for make in self._make]
        self._gone: set[int] = set()
        self._lives = Lives(args.process_restarts)
        self._on_gpu = any(device.gpu_id is not None for device in placement.engines)
        self.share_gpus = args.colocate and self._on_gpu and args.trains
        self._urls: list[str] = []
        self._router_log, self._router_host = run_dir / "logs" / "router.log", placement.host(placement.driver_ip)
        self._router: RouterProcess | None = None
        self._starting = [] if self.share_gpus else self._start()

    def _start(self) -> list[ray.ObjectRef]:
        return [actor.start.remote() for actor in self._actors]

    def wait_until_ready(self) -> list[str]:
        """Wait for all engines, and start the router of --router; returns the engines' URLs.

        If an engine does not start, its error is raised.
        """
        self._starting = self._starting or self._start()
        self._urls = self.waiter.get(self._starting, Wait("starting the engines"))
        self.waiter.looks.append(self.troubles)
        if self.args.router and self._urls:
            self._router = RouterProcess(self._urls, self._router_log, self.args.engine_timeout, self._router_host)
            self._router.start()
        return self._urls

    @property
    def router_url(self) -> str | None:
        """The URL of the router; None without --router."""
        return self._router.url if self._router else None

    @contextmanager
    def deaths_explained(self) -> Iterator[None]:
        """If the block fails because an engine is dead, raise EngineDiedError in place of the error that followed."""
        try:
            yield
        except ray.exceptions.RayError as error:
            troubles = self.troubles()
            if not troubles:
                raise
            raise EngineDiedError(f"{'; '.join(troubles)}; start again") from error

    def troubles(self) -> list[str]:
        """What is wrong with the engines and the router; takes a few seconds at most."""
        found = [f"engine {index}: {trouble}" for index, (_, trouble) in self._look().items() if trouble]
        if self._router and (trouble := self._router.trouble()):
            found.append(trouble)
        return found

    def memory(self) -> dict[str, float]:
        """The metrics `perf/memory/engine_<index>` (and on GPUs `perf/gpu_memory/...`) of those that answer soon."""
        answers = [actor.memory.remote(f"engine_{index}") for index, actor in enumerate(self._actors)]
        done = ray.wait(answers, num_returns=len(answers), timeout=LOOK_SECONDS)[0] if answers else []
        found: dict[str, float] = {}
        for answer in done:
            with suppress(ray.exceptions.RayError):  # one that ends is told elsewhere
                found |= ray.get(answer)
        return found

    def lost(self) -> dict[int, str]:
        """The engines that have ended, or have not answered for two minutes, and what is known of it."""
        return {
            index: trouble
            for index, (runs, trouble) in self._look().items()
            if self._lives.is_lost(index, runs=runs, trouble=trouble) and trouble
        }

    def start_again(self, lost: Mapping[int, str]) -> list[str]:
        """Start these engines again, with the weights of --hf-checkpoint; returns the URLs of all.

        Raises EngineDiedError where that is not possible, or has been done often enough.
        """
        for index, trouble in lost.items():
            reason = f"engine {index}: {trouble}"
            if self.share_gpus or self._router:
                raise EngineDiedError(f"{reason}; start again")
            number = self._lives.use(index)
            if number is None:
                raise EngineDiedError(f"{reason}; it may not be started again (--process-restarts); start again")
            logger.warning("%s; it is started again (%d of at most %d times)", reason, number, self._lives.allowed)
        for index in self._gone.intersection(lost):
            self._actors[index] = self._make[index]()
            self._gone.discard(index)
        starting = [self._actors[index].restart.remote() for index in lost]
        started = self.waiter.get(starting, Wait(f"starting {_named(lost)} again"))
        for index, url in zip(lost, started, strict=True):
            self._urls[index] = url
        return list(self._urls)

    def _look(self) -> dict[int, tuple[bool, str | None]]:
        """By engine whether it runs, and what is wrong with it; takes a few seconds at most."""
        answers = {actor.look.remote(): index for index, actor in enumerate(self._actors)}
        done = ray.wait(list(answers), num_returns=len(answers), timeout=LOOK_SECONDS)[0] if answers else []
        found: dict[int, tuple[bool, str | None]] = {}
        for answer, index in answers.items():
            try:
                found[index] = ray.get(answer) if answer in done else (True, "its actor does not answer")
            except ray.exceptions.RayError as error:
                self._gone.add(index)
                found[index] = (False, f"its actor ended ({type(error).__name__})")
        return found

    def hold_still(self) -> None:
        """Take no new requests, end those under way (nobody waits for them any more), flush the caches."""
        with closing(EngineGroup(self._urls, self.args.sync_timeout)) as group:
            group.post("pause_generation", {"mode": "abort"})
            group.flush()

    def release(self, parts: tuple[str, ...]) -> None:
        """Give the memory of these parts to the trainer; only engines that hold still can."""
        timeout = self.args.sync_timeout
        released = [actor.release_memory.remote(parts, timeout) for actor in self._actors]
        self.waiter.get(released, Wait("freeing the engines' memory"))

    def resume(self, parts: tuple[str, ...]) -> None:
        """Take back memory that was released, and no other: SGLang knows no better than to die of it."""
        timeout = self.args.sync_timeout
        resumed = [actor.resume_memory.remote(parts, timeout) for actor in self._actors]
        self.waiter.get(resumed, Wait("giving the engines their memory"))

    def go_on(self) -> None:
        """Take requests again."""
        with closing(EngineGroup(self._urls, self.args.sync_timeout)) as group:
            group.post("continue_generation", {})

    def stop(self) -> None:
        """Stop the router and the engines; an engine that does not stop in time is killed with its actor."""
        if self._router:
            self._router.stop()
        try:
            timeout = STOP_TIMEOUT_SECONDS_ON_GPU if self._on_gpu else STOP_TIMEOUT_SECONDS
            ray.get([actor.stop.remote() for actor in self._actors], timeout=timeout)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("an engine did not stop by itself: %s", error)


def _make_actor(args: Args, run_dir: Path, placement: Placement, index: int, shares: Sequence[Sequence[Device]]) -> Any:
    """The actor of engine `index`, given its devices on each of its nodes."""
    parts: list[tuple[dict[str, Any], EngineConfig]] = []
    for rank, devices in enumerate(shares):
        # Several calls at a time: an engine that still starts can be stopped, and be asked how it is.
        options = placement.options(devices[0], ENGINE_ENVIRONMENT) | {"max_concurrency": CALLS_AT_A_TIME}
        config = engine_config(args, run_dir, index, devices, placement.host(devices[0].node_ip))
        if rank:
            config = replace(config, log_path=run_dir / "logs" / f"engine_{index}_node_{rank}.log")
        parts.append((options, replace(config, nodes=len(shares), node_rank=rank)))
    (options, config), *others = parts
    if not others:
        remote: Any = ray.remote(EngineActor)
        return remote.options(**options).remote(config, engine_key())
    spanning: Any = ray.remote(SpanningEngineActor)
    return spanning.options(**options).remote(config, engine_key(), others)


def _named(indices: Iterable[int]) -> str:
    names = [str(index) for index in indices]
    return f"engine {names[0]}" if len(names) == 1 else f"engines {', '.join(names)}"


def engine_config(args: Args, run_dir: Path, index: int, devices: Sequence[Device], host: str = HOST) -> EngineConfig:
    """The configuration of engine `index`, which runs on `devices` of one node and listens at `host`.

    Without devices it takes what the machine shows.
    """
    return EngineConfig(
        model_path=args.hf_checkpoint,
        host=host,
        seed=args.seed + index,
        dtype=args.sglang_dtype or args.dtype,
        log_path=run_dir / "logs" / f"engine_{index}.log",
        context_length=args.rollout_max_context_len,
        max_total_tokens=args.sglang_max_total_tokens,
        max_running_requests=args.rollout_max_concurrency,
        cpu_threads=args.cpu_threads_per_engine,
        tensor_parallel_size=args.rollout_num_gpus_per_engine,
        gpu_ids=tuple(device.gpu_id for device in devices if device.gpu_id is not None),
        mem_fraction_static=args.sglang_mem_fraction_static,
        enable_memory_saver=args.colocate,
        releases_graphs=args.colocate and "cuda_graph" in ENGINE_PARTS,
        extra_args=option_words(args.sglang_options),
    )
