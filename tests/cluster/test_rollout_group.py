"""How a step's data reach the trainer's ranks, with a real Ray."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from sleuth.algo.optimizer_steps import OptimizerStepBatch
from sleuth.cluster.board import Board
from sleuth.cluster.placement import ray_session
from sleuth.cluster.rollout_group import RolloutActor, StepRefs
from sleuth.metrics.progress import Tally
from sleuth.rollout.manager import StepData
from sleuth.sample import TrainSample

RANKS, TOKENS = 2, 200_000  # large, so that Ray keeps them in its store


class ScriptedRollout(RolloutActor):
    """Makes one sample a rank, of token ids that tell step and rank."""

    def __init__(self) -> None:
        self.manager: Any = self
        self.workers = None

    def make(self, step: int) -> StepRefs:
        self.manager = SimpleNamespace(generate=self.data, state_dict=lambda: {"step": step})
        return self.generate(step)

    def data(self, step: int) -> StepData:
        samples = [TrainSample([10 * step + rank] * TOKENS, 1, [1.0] * (TOKENS - 1)) for rank in range(RANKS)]
        return StepData([[OptimizerStepBatch([[sample]], RANKS, 1.0)] for sample in samples], {"n": float(step)})

    def collect_garbage(self) -> None:
        gc.collect()


class Rank:
    def first_id(self, shards: list[ray.ObjectRef], rank: int) -> int:
        (step,) = ray.get(shards[rank])
        return step.micro_batches[0][0].token_ids[0]

    def work(self, tally: Tally) -> None:
        Board("rollout").post(tally)
        time.sleep(60)

    def niceness(self) -> int:
        return os.nice(0)


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    args: Any = SimpleNamespace(ray_address=None, total_gpus=3, actor_num_nodes=1)
    with ray_session(args):
        yield


@pytest.mark.timeout(180)
def test_ranks_take_their_shares_from_the_store_and_they_live_until_then(session: None, tmp_path: Path) -> None:
    remote: Any = ray.remote
    rollout, ranks = remote(ScriptedRollout).remote(), [remote(Rank).remote() for _ in range(RANKS)]
    first, second = (ray.get(rollout.make.remote(step)) for step in (1, 2))
    assert all(isinstance(shard, ray.ObjectRef) for shard in first.shards + second.shards)
    assert (first.metrics["n"], second.metrics["n"]) == (1, 2)
    assert (first.state, second.state) == ({"step": 1}, {"step": 2})
    assert 0 < first.metrics["perf/memory/rollout"] < 10
    ray.get(rollout.collect_garbage.remote())  # the actor itself holds no reference any more
    for step, data in ((1, first), (2, second)):
        ids = ray.get([actor.first_id.remote(data.shards, rank) for rank, actor in enumerate(ranks)])
        assert ids == [10 * step, 10 * step + 1]


@pytest.mark.timeout(180)
def test_the_driver_reads_how_far_a_busy_actor_is(session: None) -> None:
    rank: Any = ray.remote(Rank)
    noted, other, tally = Board("rollout"), Board("training"), Tally(5, 16, "trajectories", "2 failed", "step 3")
    noted.clear()
    actor = rank.remote()
    working = actor.work.remote(tally)
    while (found := noted.read()) is None:
        assert not ray.wait([working], timeout=0.1)[0]
    assert found == tally
    assert other.read() is None
    noted.clear()
    assert noted.read() is None
    ray.kill(actor)


def test_rays_processes_are_no_nicer_than_the_driver(session: None) -> None:
    rank: Any = ray.remote(Rank)
    assert ray.get(rank.remote().niceness.remote()) == os.nice(0)
