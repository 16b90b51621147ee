"""Sends the metrics of a step to the console, `metrics.jsonl`, TensorBoard and Weights & Biases.

    with Tracker(args, run_dir, first_step=steps_done + 1) as tracker:
        tracker.log(0, evaluation_metrics(samples, "demo/greedy"))
        tracker.log(1, metrics)          # training steps count from 1

A step may be logged in several parts (training, then evaluation), as long as no later step was logged in between.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from tqdm import tqdm

from sleuth.metrics.console import evaluation_lines, step_line
from sleuth.metrics.jsonl import MetricsFile
from sleuth.secrets import redact

logger = logging.getLogger(__name__)


class TrackerArgs(Protocol):
    """The arguments that the tracker reads."""

    @property
    def num_rollout(self) -> int: ...
    @property
    def use_tensorboard(self) -> bool: ...
    @property
    def use_wandb(self) -> bool: ...
    @property
    def wandb_project(self) -> str | None: ...
    @property
    def wandb_group(self) -> str | None: ...
    def to_dict(self) -> dict[str, Any]: ...


class Tracker:
    """The run's metrics log; use it in a `with` statement.

    A `first_step` above 1 resumes a run: that step and later ones are removed from the metrics in `run_dir`, because
    they are done again. 1 is a new run: all metrics of an earlier one are removed, step 0 included.
    """

    def __init__(self, args: TrackerArgs, run_dir: str | Path, *, first_step: int = 1) -> None:
        self._num_steps = args.num_rollout
        run_dir = Path(run_dir)
        self._wandb = _start_wandb(args, run_dir) if args.use_wandb else None
        self._file = MetricsFile(run_dir / "metrics.jsonl", first_step=first_step if first_step > 1 else 0)
        self._tensorboard = _tensorboard_writer(run_dir, first_step) if args.use_tensorboard else None
        self._bar = tqdm(
            total=self._num_steps,
            initial=first_step - 1,
            unit="step",
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),  # a log file gets the lines only
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of a step; values are floats (or scalar tensors), names as in docs/metrics.md.

        Raises ValueError for a step before the last one logged.
        """
        self._file.write(step, metrics)
        values = {name: float(value) for name, value in metrics.items()}
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log({"step": step} | values)
        self._show(step, values)

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        for line in (step_line(step, self._num_steps, values), *evaluation_lines(step, values)):
            if line:
                tqdm.write(line)
                logger.info(line)
        not_finite = sorted(name for name, value in values.items() if not math.isfinite(value))
        if not_finite:
            logger.warning("step %d: not a finite number: %s", step, ", ".join(not_finite))
        self._bar.n = max(self._bar.n, step)
        self._bar.refresh()
        sys.stdout.flush()

    def close(self) -> None:
        """Finish every log; the tracker cannot be used afterwards."""
        self._bar.close()
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _tensorboard_writer(run_dir: Path, first_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # slow to import, so only when it is used

    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step if first_step > 1 else None)


def _start_wandb(args: TrackerArgs, run_dir: Path) -> Any:
    """Start a W&B run, or continue it if the run is resumed: `wandb_id.txt` holds its id."""
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            "--use-wandb expects the package wandb, which is not installed; `pip install wandb`, or leave the flag out"
        ) from error
    run_dir.mkdir(parents=True, exist_ok=True)
    id_file = run_dir / "wandb_id.txt"
    sys.argv[1:] = map(redact, sys.argv[1:])  # it records the command line
    run = wandb.init(
        project=args.wandb_project,
        group=args.wandb_group,
        dir=str(run_dir),
        config=args.to_dict(),
        id=id_file.read_text().strip() if id_file.exists() else None,
        resume="allow",
    )
    run.define_metric("*", step_metric="step")  # a step logged in parts, or again after a resume, keeps its place
    id_file.write_text(run.id + "\n")
    return run
