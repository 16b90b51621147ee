"""Starts a run again from its last checkpoint, after an end that is nobody's mistake: `--restarts`.

The process replaces itself: the same command, `--load` for the checkpoint, and so all goes on as if a person had typed
it. What it must know of the runs before is in an environment variable.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from ray import exceptions as ray_errors

from sleuth.arguments import Args
from sleuth.cluster.engines import EngineDiedError
from sleuth.cluster.nodes import NodeDiedError
from sleuth.cluster.progress import Progress
from sleuth.cluster.rollout_workers import RolloutWorkerDiedError
from sleuth.cluster.waiting import TookTooLongError
from sleuth.rollout.engine_client import EngineUnavailableError
from sleuth.weight_sync.control import WeightSyncError

logger = logging.getLogger(__name__)

PAST = "SLEUTH_RESTARTS"
MOST_FRUITLESS = 2
"""So many restarts in a row may end without a new checkpoint."""
LOSSES = (
    *(EngineDiedError, EngineUnavailableError, NodeDiedError, RolloutWorkerDiedError, TookTooLongError),
    WeightSyncError,
    ray_errors.RayError,
)
NOT_LOSSES = (
    *(ray_errors.RayTaskError, ray_errors.RuntimeEnvSetupError, ray_errors.TaskCancelledError),
    *(ray_errors.ObjectStoreFullError, ray_errors.OutOfDiskError),
)
"""Errors of Ray that come again: of a user's code, of the environment, of a full disk."""


def is_loss(error: BaseException) -> bool:
    """Whether the run ended because something died or stopped, and not by what a person has written or set."""
    cause = error.cause if isinstance(error, ray_errors.RayTaskError) else error
    if isinstance(cause, NOT_LOSSES) or "creation task" in str(cause):  # the constructor of an actor raised something
        return False
    return isinstance(cause, LOSSES)


@dataclass(frozen=True, slots=True)
class Restart:
    """A command that goes on with the run, and what is told of it."""

    command: list[str]
    environment: dict[str, str]
    told: str

    def begin(self) -> NoReturn:
        """Replace this process. What it held must be let go: locks, Ray, trackers."""
        logging.shutdown()
        sys.stdout.flush()
        os.execve(self.command[0], self.command, self.environment)


@dataclass(slots=True)
class Restarts:
    """The restarts so far, and how many of the last ones in a row ended without a new checkpoint."""

    environment: dict[str, str] = field(default_factory=dict, repr=False)
    count: int = 0
    fruitless: int = 0
    progress: Progress | None = None
    """Of this run, once it has one."""

    @classmethod
    def so_far(cls) -> Restarts:
        """Those that led to this process, which is to call it before anything else changes its environment."""
        count, fruitless = map(int, os.environ.pop(PAST, "0 0").split())
        return cls(dict(os.environ), count, fruitless)

    def after(self, error: Exception, args: Args) -> Restart | str | None:
        """How a run that ended with `error` goes on; a sentence if it cannot, None if it was not to."""
        if args.restarts == 0 or args.save is None or not args.trains or not is_loss(error):
            return None
        if self.count >= args.restarts:
            return f"--restarts {args.restarts}: all are used"
        progress = self.progress
        advanced = progress is not None and progress.saved > progress.resumed
        fruitless = self.fruitless + 1 if self.count and not advanced else 0
        if fruitless >= MOST_FRUITLESS:
            return f"--restarts {args.restarts}: the last {fruitless} ended without a new checkpoint"
        if progress and progress.done > progress.saved and progress.folder is None:
            return f"--restarts {args.restarts}: there is no checkpoint to start again from"
        flags, start = _way_on(args, args.save, progress)
        number = self.count + 1
        return Restart(
            [sys.executable, *sys.orig_argv[1:], *flags, "--run-dir", str(args.run_dir)],
            self.environment | {PAST: f"{number} {fruitless}"},
            f"the run is started again from {start} ({number} of at most {args.restarts} times)",
        )


def _way_on(args: Args, save: Path, progress: Progress | None) -> tuple[list[str], str]:
    """The flags to go on with, and where that is."""
    if progress and progress.folder is not None:
        finetune = ["--no-finetune"] if args.finetune else []
        return ["--load", str(progress.folder), *finetune], f"step {progress.saved} of {progress.folder}"
    if args.load is None:  # the folder is still empty, but may have the samples of the first step
        return ["--load", str(save)], "the beginning"
    return [], f"--load {args.load}"
