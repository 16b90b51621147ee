"""Start and stop everything a run needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sleuth.arguments import Args
from sleuth.cluster.placement import Placement, place, ray_session
from sleuth.cluster.rollout_group import RolloutGroup
from sleuth.cluster.train_group import TrainGroup


@dataclass(frozen=True, slots=True)
class Run:
    """A started run: its two sides, and how many steps a checkpoint already holds."""

    trainer: TrainGroup
    rollout: RolloutGroup
    steps_done: int


@contextmanager
def start_run(args: Args, run_dir: Path) -> Iterator[Run]:
    """Start trainer and engines side by side; stop them, and only them, at the end."""
    with _rollout_side(args, run_dir) as (placement, rollout):
        trainer = TrainGroup(args, run_dir, placement)
        rollout.wait_until_loaded()
        steps_done, state = trainer.wait_until_ready()
        rollout.wait_until_ready(state)
        yield Run(trainer, rollout, steps_done)
        trainer.close()  # not after an error: ranks may wait for each other, and all of them end with Ray


@contextmanager
def start_rollout(args: Args, run_dir: Path) -> Iterator[RolloutGroup]:
    """Start the engines alone, which keep the weights of `--hf-checkpoint`; stop them at the end."""
    with _rollout_side(args, run_dir) as (_, rollout):
        rollout.wait_until_loaded()
        rollout.wait_until_ready({})
        yield rollout


@contextmanager
def _rollout_side(args: Args, run_dir: Path) -> Iterator[tuple[Placement, RolloutGroup]]:
    """Ray, the devices, and a rollout side that has begun to start."""
    with ray_session(args):
        placement = place(args)
        rollout = RolloutGroup(args, run_dir, placement)
        try:
            yield placement, rollout
        finally:
            rollout.close()
            placement.remove()
