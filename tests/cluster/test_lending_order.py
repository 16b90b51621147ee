"""The real loop on a scripted machine that refuses whatever a real one would die of, or that is out of order.

One GPU of 80 units: the trainer's weights, gradients and optimizer take 10 + 20 + 40 of them, an engine's weights, KV
cache and graphs 8 + 60 + 2. The scripted engine behaves as SGLang does: it releases only when it is idle and its cache
flushed, resumes nothing that it did not release, and forgets the weights that it releases.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

import train
from sleuth.cluster.engines import Engines
from sleuth.cluster.memory_turns import ENGINE_PARTS, TRAINER_PARTS, MemoryTurns, Turn
from sleuth.cluster.progress import Progress
from sleuth.cluster.rollout_group import RolloutGroup, StepRefs
from sleuth.cluster.run import Run, share_memory
from sleuth.cluster.signals import Interruption
from sleuth.cluster.train_group import TrainGroup
from sleuth.cluster.waiting import Waiter
from sleuth.weight_sync.control import EngineGroup

CAPACITY = 80
TRAINER_SIZES = {"weights": 10, "gradients": 20, "optimizer": 40}
ENGINE_SIZES = {"weights": 8, "kv_cache": 60, "cuda_graph": 2}
KV = ("kv_cache", "cuda_graph")
STEP = [
    "engine: pause_generation",
    "engine: flush_cache",
    "engine: release weights kv_cache cuda_graph",
    "trainer: back weights gradients optimizer",
    "trainer: train",
    "trainer: lend gradients optimizer",
    "engine: resume weights",
    "trainer: push",
    "trainer: score",
    "trainer: lend weights",
    "engine: resume kv_cache cuda_graph",
    "engine: continue_generation",
    "engine: generate",
]
"""From the end of a rollout to the next one's beginning (the probe) where every step has its sync."""


class Machine:
    """One GPU, an engine and a trainer on it; `log` is what they were told. It starts as a run does: all lent."""

    def __init__(self) -> None:
        self.engine, self.trainer = set(ENGINE_PARTS), set[str]()
        self.paused = self.flushed = False
        self.pending = 0
        self.engine_weights: Any = "of the file"
        self.trainer_weights = 0
        self.log: list[str] = []

    def note(self, *words: str) -> None:
        self.log.append(" ".join(words))
        used = sum(TRAINER_SIZES[part] for part in self.trainer) + sum(ENGINE_SIZES[part] for part in self.engine)
        assert used <= CAPACITY, f"out of memory: {used} after {self.log[-1]}"

    def post(self, path: str, body: Any) -> None:
        """What a request to the engine does."""
        if path == "release_memory_occupation":
            assert self.paused, "released while requests may come"
            assert not self.pending, "the scheduler asserts that it is idle"
            assert self.flushed, "released before its cache was flushed"
            assert set(body["tags"]) <= self.engine, "released twice"
            self.engine -= set(body["tags"])
            if "weights" in body["tags"]:
                self.engine_weights = None
            self.note("engine: release", *body["tags"])
        elif path == "resume_memory_occupation":
            assert not set(body["tags"]) & self.engine, "KeyError in the scheduler: resumed without a release"
            self.engine |= set(body["tags"])
            self.note("engine: resume", *body["tags"])
        else:
            if path == "pause_generation":
                self.paused, self.pending = True, 0
            elif path == "flush_cache":
                assert not self.pending
                self.flushed = True
            elif path == "continue_generation":
                assert self.engine == set(ENGINE_PARTS), "continued without its memory"
                self.paused = False
            self.note(f"engine: {path}")

    def generate(self, step: int = 0) -> StepRefs:
        assert not self.paused
        assert self.engine == set(ENGINE_PARTS)
        assert self.engine_weights is not None, "generated with weights that were lost"
        self.flushed, self.pending = False, 1  # a request that nobody waits for may be left
        self.note("engine: generate")
        return StepRefs([], {}, {})

    def probe(self) -> list[list[float]]:
        self.generate()
        return [[float(self.engine_weights)]]

    def train(self, shards: Any) -> tuple[dict[str, float], dict[int, Any]]:
        assert self.trainer == set(TRAINER_PARTS)
        self.trainer_weights += 1
        self.note("trainer: train")
        return {}, {}

    def push(self, urls: list[str], version: str, engines: list[int] | None) -> None:
        assert "weights" in self.engine
        assert "weights" in self.trainer
        self.engine_weights = self.trainer_weights
        self.note("trainer: push")

    def score(self, ids: list[int]) -> list[float]:
        assert "weights" in self.trainer
        self.note("trainer: score")
        return [float(self.trainer_weights)]

    def save(self, step: int, state: Any) -> None:
        assert self.trainer == set(TRAINER_PARTS)
        self.note("trainer: save")

    def finish_save(self, wait: bool) -> bool:
        return True

    def lend(self, parts: tuple[str, ...]) -> None:
        self.trainer -= set(parts)
        self.note("trainer: lend", *parts)

    def take_back(self, parts: tuple[str, ...]) -> None:
        self.trainer |= set(parts)
        self.note("trainer: back", *parts)


def actor(**methods: Any) -> Any:
    """Looks like a Ray actor; `ray.get` is the identity here."""
    return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(ray, "get", lambda answer, timeout=None: answer)
    monkeypatch.setattr(ray, "wait", lambda answers, num_returns, timeout: (answers, []))
    monkeypatch.setattr(EngineGroup, "_post_one", lambda self, url, path, body: made.post(path, body))
    return made


def start(machine: Machine, **changes: Any) -> Run:
    args: Any = SimpleNamespace(
        **{
            "num_rollout": 4,
            "eval_before_train": True,
            "eval_interval": None,
            "update_weights_interval": 1,
            "save": Path("SAVE"),
            "save_on_exit": True,
            "async_save": True,
            "save_interval": 2,
            "max_logprob_diff": 1e-9,
            "write": lambda path: None,
            "sync_timeout": 1.0,
            "train_timeout": 1.0,
        }
        | changes
    )
    trainer, rollout, engines = (object.__new__(cls) for cls in (TrainGroup, RolloutGroup, Engines))
    engines.args, engines._urls = args, ["http://engine"]
    trainer.args = args
    trainer.waiter = rollout.waiter = engines.waiter = Waiter()
    rollout.meanwhile = lambda: None
    engines._actors = [
        actor(
            release_memory=lambda tags, timeout: machine.post("release_memory_occupation", {"tags": tags}),
            resume_memory=lambda tags, timeout: machine.post("resume_memory_occupation", {"tags": tags}),
            memory=lambda name: {},
        )
    ]
    rollout.engines, rollout.engine_urls, rollout.probe_ids = engines, ["http://engine"], [5, 6]
    rollout._manager = actor(
        generate=machine.generate,
        evaluate=lambda step: machine.generate(step).metrics,
        probe_engines=machine.probe,
        state_dict=dict,
    )
    parts = {name: getattr(machine, name) for name in ("train", "score", "save", "finish_save", "lend", "take_back")}
    trainer._actors = [actor(**parts, push_weights=machine.push)]
    share_memory(args, trainer, rollout)
    machine.log.clear()
    return Run(args, trainer, rollout, Progress.start(0, None), Interruption())


def run_loop(run: Run) -> None:
    tracker: Any = SimpleNamespace(log=lambda step, metrics: None)
    train.train(run.args, run, tracker)


def test_a_step_goes_in_the_order_that_is_written_down(machine: Machine) -> None:
    run = start(machine, save=None)
    run_loop(run)
    first = machine.log.index("engine: release weights kv_cache cuda_graph") - 2
    assert machine.log[first : first + len(STEP)] == STEP
    assert machine.log[first + len(STEP)] == "engine: generate"
    assert machine.log.count("trainer: train") == 4
    assert machine.engine == set(ENGINE_PARTS)


def test_the_first_sync_takes_no_more_than_it_needs(machine: Machine) -> None:
    run = start(machine, save=None, num_rollout=0)
    run_loop(run)
    assert machine.log == [
        "engine: pause_generation",
        "engine: flush_cache",
        "engine: release kv_cache cuda_graph",
        "trainer: back weights",
        "trainer: push",
        "trainer: score",
        "trainer: lend weights",
        "engine: resume kv_cache cuda_graph",
        "engine: continue_generation",
        "engine: generate",  # the probe
        "engine: generate",  # the evaluation before training
    ]


@pytest.mark.parametrize("interval", [1, 2, 3, 9])
@pytest.mark.parametrize("evaluation", [None, 1, 2])
@pytest.mark.parametrize("saving", [1, 2])
def test_any_schedule_keeps_the_order_and_the_memory(
    machine: Machine, interval: int, evaluation: int | None, saving: int
) -> None:
    run = start(machine, update_weights_interval=interval, eval_interval=evaluation, save_interval=saving)
    run_loop(run)
    assert machine.log.count("trainer: save") == 4 // saving
    assert machine.engine_weights == 4
    lost = any("release weights" in entry for entry in machine.log)
    assert lost == (interval == 1)  # others need them for rollouts before the next sync


@pytest.mark.parametrize("at", ["train", "generate", "push", "score"])
def test_what_is_done_is_saved_from_wherever_a_run_is_interrupted(machine: Machine, at: str) -> None:
    run = start(machine, save_interval=9)
    holder = run.rollout._manager if at == "generate" else run.trainer._actors[0]
    name = "push_weights" if at == "push" else at
    method = getattr(holder, name).remote
    if at == "train":  # a signal waits for the end of the training
        interrupted = on_call(2, method, run.interruption.on_signal)
    else:
        interrupted = on_call(3, method, raise_interrupt)
    setattr(holder, name, SimpleNamespace(remote=interrupted))
    with pytest.raises(KeyboardInterrupt, match="step 2 is saved in SAVE"), run.saved_on_exit():
        run_loop(run)
    assert machine.log[-1] == "trainer: save"


def on_call(number: int, function: Any, what: Callable[[], None]) -> Any:
    """`function`, at the end of whose call `number` this happens."""
    left = [number]

    def called(*args: Any) -> Any:
        result = function(*args)
        left[0] -= 1
        if left[0] == 0:
            what()
        return result

    return called


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def test_engines_that_lost_their_weights_do_not_generate_before_a_sync(machine: Machine) -> None:
    run = start(machine)
    run.trainer.turn_to(Turn.TRAIN)
    with pytest.raises(AssertionError, match="a sync must come between"):
        run.rollout.generate(1)


def test_the_scripted_machine_refuses_other_orders(machine: Machine) -> None:
    with pytest.raises(AssertionError, match="while requests may come"):
        machine.post("release_memory_occupation", {"tags": KV})
    machine.post("pause_generation", {})
    with pytest.raises(AssertionError, match="before its cache was flushed"):
        machine.post("release_memory_occupation", {"tags": KV})
    with pytest.raises(AssertionError, match="resumed without a release"):
        machine.post("resume_memory_occupation", {"tags": KV})
    machine.take_back(("weights",))
    with pytest.raises(AssertionError, match="out of memory: 100 after trainer: back gradients"):
        machine.take_back(("gradients",))


def test_turns_give_before_they_take() -> None:
    """Also between turns that the loop never has in a row."""
    for before in Turn:
        for after in Turn:
            if Turn.TRAIN in (before, after) and Turn.SYNC not in (before, after):
                continue
            machine = Machine()
            engines: Any = SimpleNamespace(
                hold_still=lambda m=machine: [m.post("pause_generation", {}), m.post("flush_cache", {})],
                release=lambda parts, m=machine: m.post("release_memory_occupation", {"tags": parts}),
                resume=lambda parts, m=machine: m.post("resume_memory_occupation", {"tags": parts}),
                go_on=lambda m=machine: m.post("continue_generation", {}),
            )
            turns = MemoryTurns(engines, machine, keep_weights=False)
            turns.turn_to(before)
            turns.turn_to(after)
            assert turns.turn is after
