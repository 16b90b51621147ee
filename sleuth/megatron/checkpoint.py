"""Checkpoints in megatron's torch_dist format, readable in another parallel layout.

A checkpoint's folder holds weights and optimizer (torch_dist), rollout_state.json, sleuth.json (which describes it),
rng_*.pt (the random state of each rank) and manifest.json (the checksums of all these files). `sleuth.checkpoints` sees
to it that the folder is whole or not there.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from sleuth import checkpoints
from sleuth.manifest import Entry, entries_of, write_manifest
from sleuth.megatron import parallel
from sleuth.megatron.background_write import BackgroundWrite
from sleuth.megatron.model import PolicyModel
from sleuth.megatron.optimizer import PolicyOptimizer
from sleuth.megatron.sharded_state import (
    UNREADABLE,
    last_line,
    load_chunks,
    loadable_state,
    model_state,
    read_into,
    sharding_metadata,
)
from sleuth.megatron.verify import check_checkpoint
from sleuth.paths import follow_umask

logger = logging.getLogger(__name__)

_ROLLOUT_STATE = "rollout_state.json"
_FORMAT = 1
_INSTEAD = "copy the checkpoint again, or name an earlier one"
ResultT = TypeVar("ResultT")


def existing_checkpoint(folder: Path, iteration: int | None = None) -> Path:
    """As `checkpoints.find_checkpoint`, but if there is no checkpoint, raises ValueError that says what to do."""
    found = checkpoints.find_checkpoint(folder, iteration)
    if found is None:
        raise ValueError(
            f"expected a torch_dist checkpoint in {folder}, found no {checkpoints.TRACKER}; "
            "tools/convert_hf_to_torch_dist.py makes one from a Hugging Face model"
        )
    return found


def load_weights(
    chunks: Sequence[PolicyModel], folder: Path, iteration: int | None = None, *, verify: bool = True
) -> Path:
    """Load only the weights; returns the checkpoint's folder. Collective.

    `verify` compares the files with their checksums first. ValueError if there is no checkpoint, or it is damaged or
    does not fit.
    """
    found = existing_checkpoint(folder, iteration)
    check_checkpoint(found, verify=verify)
    state = loadable_state(chunks, sharding_metadata(), found)
    read_into(state, found)
    load_chunks(chunks, state)
    return found


@dataclass(frozen=True, slots=True)
class _Saving:
    """A save under way: what is still to be done when its tensors are written."""

    folder: Path
    unfinished: Path
    step: int
    keep: int
    description: dict[str, Any]
    rollout_state: str
    random_state: dict[str, Any]
    write: BackgroundWrite | None

    def complete(self) -> dict[str, Entry]:
        """Wait for the tensors, and write what is this rank's own; returns the checksums of its files."""
        known: dict[str, Entry] = {}
        if self.write is not None:
            self.write.finish()
            known = self.write.checksums
        own = f"rng_{dist.get_rank():05d}.pt"
        torch.save(self.random_state, self.unfinished / own)
        return known | entries_of(self.unfinished, [own])

    def publish(self, known: dict[str, Entry]) -> None:
        """Complete the folder, whose `known` files have these checksums, and move it to its place."""
        (self.unfinished / checkpoints.DESCRIPTION).write_text(json.dumps(self.description, indent=1))
        (self.unfinished / _ROLLOUT_STATE).write_text(self.rollout_state)
        write_manifest(self.unfinished, known)
        follow_umask(self.unfinished)
        checkpoints.publish(self.unfinished, self.folder, self.step)


class Checkpoints:
    """Saves and loads model and optimizer together; `optimizer` None saves weights alone.

    `strategy` writes the tensors [megatron's own, in the background].
    """

    def __init__(
        self,
        chunks: Sequence[PolicyModel],
        optimizer: PolicyOptimizer | None,
        strategy: SaveShardedStrategy | None = None,
    ) -> None:
        self.chunks, self.optimizer, self.strategy = chunks, optimizer, strategy
        self._saving: _Saving | None = None

    @property
    def _distributed(self) -> bool:
        return self.optimizer is not None and self.optimizer.distributed

    def save(self, folder: Path, step: int, rollout_state: dict[str, Any], *, keep: int = 0) -> Path:
        """As `begin`, and wait until it is published; returns the checkpoint's folder."""
        self.begin(folder, step, rollout_state, keep=keep)
        self.finish()
        return checkpoints.checkpoint_folder(folder, step)

    def begin(self, folder: Path, step: int, rollout_state: dict[str, Any], *, keep: int = 0) -> None:
        """Begin to save as the newest checkpoint of `folder`. The model may change when this returns. Collective.

        `finish` publishes it, and deletes all but the latest `keep` checkpoints (0: keep all). A save that is under way
        is finished first. Raises OSError, with the checkpoints before intact, when the disk is full.
        """
        self.finish()
        unfinished = checkpoints.unfinished_folder(folder, step)
        self._on_first_rank(lambda: self._prepare(folder, unfinished))
        description, state, random = self._describe(step), json.dumps(rollout_state), _random_state()
        with self._cleaned_up(unfinished):
            write = self._write(unfinished)
        self._saving = _Saving(folder, unfinished, step, keep, description, state, random, write)

    def finish(self, *, wait: bool = True) -> bool:
        """Publish the checkpoint that was begun; without `wait`, only if it is written. Collective.

        Returns whether no save is under way any more. Raises OSError, with the checkpoints before intact, where one
        could not be written.
        """
        saving = self._saving
        if saving is None:
            return True
        if not (wait or saving.write is None or saving.write.done()):
            return False
        self._saving = None
        with self._cleaned_up(saving.unfinished):
            known = parallel.merged(self._written(saving.unfinished, saving.complete))
            self._on_first_rank(lambda: saving.publish(known))
        self._on_first_rank(lambda: checkpoints.prune(saving.folder, saving.step, saving.keep))
        return True

    def load_latest(self, folder: Path, *, verify: bool = True) -> tuple[int, dict[str, Any]] | None:
        """Resume from the newest checkpoint of `folder`: (its step, its rollout state), or None if there is none.

        `verify` compares the files with their checksums first. ValueError if the checkpoint is damaged or does not fit.
        """
        assert self.optimizer is not None
        found = checkpoints.find_checkpoint(folder)
        if found is None:
            return None
        check_checkpoint(found, verify=verify)
        if problem := checkpoints.resuming_problem(found, distributed=self._distributed):
            raise ValueError(problem)
        description = checkpoints.read_description(found)
        metadata = sharding_metadata()
        state: dict[str, Any] = loadable_state(self.chunks, metadata, found)
        state["optimizer"] = self.optimizer.sharded_state_dict(dict(state), loading=True, metadata=metadata)
        read_into(state, found)
        load_chunks(self.chunks, state)
        self.optimizer.load_state_dict(state["optimizer"], description["optimizer_steps"])
        _restore_random_state(found, description)
        return description["step"], _rollout_state(found)

    def _write(self, unfinished: Path) -> BackgroundWrite | None:
        """Write what the folder is to hold; the tensors in the background, unless another strategy is to write them."""
        metadata = sharding_metadata()
        state: dict[str, Any] = model_state(self.chunks, metadata)
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer.sharded_state_dict(dict(state), loading=False, metadata=metadata)

        def write() -> BackgroundWrite | None:
            if self.strategy is None:
                return BackgroundWrite(state, unfinished)
            dist_checkpointing.save(state, str(unfinished), self.strategy)
            return None

        return self._written(unfinished, write)

    @staticmethod
    def _written(unfinished: Path, write: Callable[[], ResultT]) -> ResultT:
        """What `write` returns; what it raises on any rank is raised on all, as an error that names the folder."""
        error: Exception | None = None
        try:
            result = write()
        except (Exception, CheckpointException) as problem:  # the latter is no Exception
            error = _write_error(problem, unfinished.parent)
        parallel.raise_together(error)
        return result

    @contextmanager
    def _cleaned_up(self, unfinished: Path) -> Iterator[None]:
        """Remove the folder if the body fails: it will not become a checkpoint."""
        try:
            yield
        except Exception:
            if dist.get_rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _describe(self, step: int) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "step": step,
            "optimizer_steps": None if self.optimizer is None else self.optimizer.steps_done,
            "distributed_optimizer": self._distributed,
            "world_size": dist.get_world_size(),
            "layout": _layout(),
        }

    def _prepare(self, folder: Path, unfinished: Path) -> None:
        checkpoints.tidy(folder)
        self._check_space(folder)
        unfinished.mkdir()

    def _check_space(self, folder: Path) -> None:
        """Raise OSError if the disk has certainly too little room."""
        ranks = (
            parallel_state.get_tensor_model_parallel_world_size()
            * parallel_state.get_pipeline_model_parallel_world_size()
        )
        per_value = 0 if self.optimizer is None else 8
        needed = ranks * sum(p.numel() * (p.element_size() + per_value) for c in self.chunks for p in c.parameters())
        free = shutil.disk_usage(folder).free
        if free < needed:
            # A conversion, which has no optimizer, keeps no others.
            other = "" if self.optimizer is None else ", or keep fewer checkpoints (--save-keep)"
            raise OSError(
                errno.ENOSPC,
                f"the checkpoint needs about {needed / 1e9:.3f} GB, {folder} has {free / 1e9:.3f} GB free; make room"
                f"{other}",
            )

    @staticmethod
    def _on_first_rank(action: Callable[[], object]) -> None:
        """Run `action` on rank 0; an error in it is raised on every rank."""
        error: Exception | None = None
        if dist.get_rank() == 0:
            try:
                action()
            except Exception as problem:
                error = problem
        parallel.raise_together(error)


def _write_error(problem: BaseException, folder: Path) -> OSError:
    """The error to raise. Torch's writer hides the system's error, so the message states the free space instead."""
    cause = str(problem).strip().splitlines()[-1]
    free = shutil.disk_usage(folder).free / 1e9
    return OSError(
        f"the checkpoint could not be written to {folder} ({cause}); {free:.1f} GB are free there. "
        "The checkpoints before it are intact"
    )


def _layout() -> dict[str, int]:
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
    }


def _rollout_state(found: Path) -> dict[str, Any]:
    path = found / _ROLLOUT_STATE
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"the rollout's state in {path} cannot be read ({error}); {_INSTEAD}") from error
    return state


def _random_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(found: Path, description: dict[str, Any]) -> None:
    """Restore the random state of this rank, but only if the ranks are laid out as they were when it was saved."""
    if description["world_size"] != dist.get_world_size() or description["layout"] != _layout():
        logger.info("the checkpoint was saved in another layout: random state starts anew from --seed")
        return
    path = found / f"rng_{dist.get_rank():05d}.pt"
    try:
        state = torch.load(path, weights_only=True)
    except UNREADABLE as error:
        raise ValueError(f"the random state in {path} cannot be read ({last_line(error)}); {_INSTEAD}") from error
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
