"""Start and stop everything a run needs, and take its steps so that each is whole or not there."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sleuth.arguments import Args
from sleuth.checkpoints import CONFIGURATION, checkpoint_folder
from sleuth.cluster.memory_turns import TRAINER_PARTS, MemoryTurns
from sleuth.cluster.nodes import check_nodes, node_deaths_explained, watch_nodes
from sleuth.cluster.placement import Placement, check_devices, place, ray_session
from sleuth.cluster.progress import Progress
from sleuth.cluster.ray_watch import control_store_watched
from sleuth.cluster.rollout_group import RolloutGroup, StepRefs
from sleuth.cluster.signals import Interruption
from sleuth.cluster.train_group import TrainGroup
from sleuth.cluster.waiting import Waiter

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Run:
    """A started run: trainer, rollout, and how far they are."""

    args: Args
    trainer: TrainGroup
    rollout: RolloutGroup
    progress: Progress
    interruption: Interruption
    _rollout_state: dict[str, Any] = field(default_factory=dict)
    _whole: bool = True
    _saving: int | None = None
    """The step whose checkpoint is being written."""

    @property
    def steps_done(self) -> int:
        """Steps whose training is done, those of a loaded checkpoint included."""
        return self.progress.done

    def generate(self, step: int) -> StepRefs:
        """Begin `step`: its data."""
        self.progress.step = step
        return self.rollout.generate(step)

    def train(self, step: int, data: StepRefs, metrics: dict[str, float]) -> None:
        """Train on the data of `step`; adds to `metrics`, which are there even if an interruption has waited.

        What a checkpoint of the step needs of the rollout is taken down before, since the next step's rollout moves
        on. The step counts as done, and the trainer as whole, when every rank says so: an interruption waits for
        that. Where it cannot, or a rank fails, nothing is saved any more: the weights may be those of half a step.
        """
        state = self.rollout.state_dict()
        self.finish_save(wait=False)
        with self._held(f"finishing the training of step {step}, to save it"):
            self._whole = False
            metrics |= self.trainer.train(step, data.shards)
            self.progress.done, self._rollout_state, self._whole = step, state, True

    def save(self) -> None:
        """Save the steps that are done under --save. With --async-save this only begins it; `finish_save` ends it."""
        self.finish_save()
        done = self.progress.done
        with self._held(f"saving step {done} in {self.args.save}"):
            self.trainer.save(done, self._rollout_state)
            self._saving = done
        if not self.args.async_save:
            self.finish_save()

    def finish_save(self, *, wait: bool = True) -> None:
        """Publish the checkpoint that is being written, if there is one; without `wait`, only if it is written."""
        if self._saving is None:
            return
        step, self._saving = self._saving, None
        with self.interruption.held(f"finishing the checkpoint of step {step} in {self.args.save}"):
            if self.trainer.finish_save(wait=wait):
                if self.args.save is not None:
                    note_configuration(self.args, checkpoint_folder(self.args.save, step))
                self.progress.saved, self.progress.folder = step, self.args.save
            else:
                self._saving = step

    @contextmanager
    def saved_on_exit(self) -> Iterator[None]:
        """Where the body is interrupted, save what is done and not saved; KeyboardInterrupt then says how things are.

        Where it fails, as when an engine dies, a checkpoint that is being written is still published.
        Between the calls of `train` nothing changes the trainer, and its ranks answer one call after the other.
        """
        try:
            yield
        except KeyboardInterrupt:
            self._save_if_needed()
            raise KeyboardInterrupt(self.progress.interrupted()) from None
        except Exception:
            self._finish_if_needed()
            raise

    def _finish_if_needed(self) -> None:
        if not self._whole:  # ranks may wait for each other
            return
        try:
            self.finish_save()
        except Exception as error:
            logger.warning("a checkpoint could not be finished: %s", error)

    def _save_if_needed(self) -> None:
        progress = self.progress
        if self.interruption.gave_up or not self._whole:
            return
        try:
            self.finish_save()
            if self._saves_on_exit and progress.saved != progress.done:
                self.save()
                self.finish_save()
        except KeyboardInterrupt:
            logger.info("the save on exit was given up")
        except Exception as error:
            logger.warning("step %d could not be saved on exit: %s", progress.done, error)

    @property
    def _saves_on_exit(self) -> bool:
        return self.args.save is not None and self.args.save_on_exit

    def _held(self, what: str) -> AbstractContextManager[None]:
        return self.interruption.held(what) if self._saves_on_exit else nullcontext()


def note_configuration(args: Args, checkpoint: Path) -> None:
    """Write the configuration beside the weights: a run that goes on from them tells what changed since."""
    try:
        args.write(checkpoint / CONFIGURATION)
    except OSError as error:  # the checkpoint is whole without it, or lies on another machine's disk
        logger.warning("the configuration could not be written into %s: %s", checkpoint, error)


@contextmanager
def start_run(args: Args, run_dir: Path, interruption: Interruption) -> Iterator[Run]:
    """Start trainer and engines; stop them, and only them, at the end.

    They start side by side, unless they share GPUs: then the engines come when the trainer has lent its memory.
    """
    with _rollout_side(args, run_dir) as (placement, rollout):
        trainer = TrainGroup(args, run_dir, placement, rollout.waiter)
        rollout.wait_until_loaded()
        steps_done, state = trainer.wait_until_ready()
        if rollout.engines.share_gpus:
            share_memory(args, trainer, rollout)
        rollout.wait_until_ready(state)
        run = Run(args, trainer, rollout, Progress.start(steps_done, args.load), interruption)
        rollout.meanwhile = lambda: run.finish_save(wait=False)
        rollout.send_weights = lambda urls, engines: trainer.push_weights(urls, str(run.steps_done), engines)
        yield run
        trainer.close()  # not after an error: ranks may wait for each other, and all of them end with Ray


def share_memory(args: Args, trainer: TrainGroup, rollout: RolloutGroup) -> None:
    """Lend the trainer's memory, and have both sides ask for it from now on where they need it."""
    trainer.lend(TRAINER_PARTS)
    turns = MemoryTurns(rollout.engines, trainer, keep_weights=args.update_weights_interval > 1)
    trainer.turn_to = rollout.turn_to = turns.turn_to


@contextmanager
def start_rollout(args: Args, run_dir: Path) -> Iterator[RolloutGroup]:
    """Start engines without a trainer, with the weights of `--hf-checkpoint`; stop them at the end of the block."""
    with _rollout_side(args, run_dir) as (_, rollout):
        rollout.wait_until_loaded()
        rollout.wait_until_ready({})
        yield rollout


@contextmanager
def _rollout_side(args: Args, run_dir: Path) -> Iterator[tuple[Placement, RolloutGroup]]:
    """Start Ray, reserve the devices, and begin to start the rollout group; stop all of it at the end of the block."""
    with ray_session(args), control_store_watched(run_dir, args.save):
        placement = place(args)
        try:
            with node_deaths_explained(placement.nodes, args.save):
                check_nodes(args, run_dir, placement.nodes)
                check_devices(placement, args.rollout_num_gpus_per_engine)
                rollout = RolloutGroup(args, run_dir, placement, Waiter([watch_nodes(placement.nodes)]))
                try:
                    yield placement, rollout
                finally:
                    rollout.close()
        finally:
            placement.remove()
