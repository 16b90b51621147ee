"""Sends the metrics of a step to the console, `metrics.jsonl`, and the trackers that the flags name.

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
from functools import partial
from pathlib import Path
from typing import Self

from tqdm import tqdm

from sleuth.metrics.alarms import alarms, watched
from sleuth.metrics.catalog import with_aliases
from sleuth.metrics.console import evaluation_lines, step_line
from sleuth.metrics.destinations import CLASSES, TrackerArgs
from sleuth.metrics.guard import Guarded
from sleuth.metrics.jsonl import MetricsFile, read_metrics
from sleuth.metrics.step_warnings import step_warnings
from sleuth.secrets import redact

logger = logging.getLogger(__name__)


class Tracker:
    """The run's metrics log; use it in a `with` statement.

    A `first_step` above 1 resumes a run: that step and later ones are removed from the metrics in `run_dir`, because
    they are done again. 1 is a new run: all metrics of an earlier one are removed, step 0 included.
    """

    def __init__(self, args: TrackerArgs, run_dir: str | Path, *, first_step: int = 1) -> None:
        self._num_steps = args.num_rollout
        self._signs: set[str] = set()
        run_dir = Path(run_dir)
        path = run_dir / "metrics.jsonl"
        self._file = MetricsFile(path, first_step=first_step if first_step > 1 else 0)
        self._history = [watched(line) for line in read_metrics(path)]
        sys.argv[1:] = map(redact, sys.argv[1:])  # trackers record the command line
        self._destinations = [
            Guarded(name, partial(opened, args, run_dir, first_step))
            for name, opened in CLASSES.items()
            if getattr(args, f"use_{name}")
        ]
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
        metrics = with_aliases(metrics)
        try:
            self._file.write(step, metrics)
        except OSError as error:  # a full disk
            logger.warning("the metrics of step %d are not in metrics.jsonl: %s", step, error)
        values = {name: float(value) for name, value in metrics.items()}
        for destination in self._destinations:
            destination.log(step, values)
        self._show(step, values)

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        for line in (step_line(step, self._num_steps, values), *evaluation_lines(step, values)):
            if line:
                tqdm.write(line)
                logger.info(line)
        not_finite = sorted(name for name, value in values.items() if not math.isfinite(value))
        if not_finite:
            logger.warning("step %d: not a finite number: %s", step, ", ".join(not_finite))
        if "rollout/samples" in values:
            self._history.append(watched(values))
            signs = step_warnings(values) | alarms(self._history)
            for name in signs.keys() - self._signs:  # told once, and again where it had gone
                logger.warning("step %d: %s", step, signs[name])
            self._signs = set(signs)
        self._bar.n = max(self._bar.n, step)
        self._bar.refresh()
        sys.stdout.flush()

    def close(self) -> None:
        """Finish every log; the tracker cannot be used afterwards."""
        self._bar.close()
        try:
            self._file.close()
        except OSError as error:
            logger.warning("metrics.jsonl could not be closed: %s", error)
        for destination in self._destinations:
            destination.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
