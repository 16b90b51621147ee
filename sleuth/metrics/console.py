"""What a person sees while training runs: one line for each step, and log lines that do not break the progress bar."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping

from tqdm import tqdm


class ProgressSafeHandler(logging.Handler):
    """A logging handler that writes to standard error, above any tqdm bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
            sys.stderr.flush()
        except Exception:  # a broken stream must not end training; logging's own way to report it
            self.handleError(record)


def _plain(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


def _small(value: float) -> str:
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:.1e}"


STEP_FIELDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward", "reward/mean", _plain(3)),
    ("EM", "reward/exact_match", _plain(2)),
    ("format", "reward/valid_format", _plain(2)),
    ("searches", "rollout/searches", _plain(2)),
    ("length", "rollout/response_length/mean", _plain(0)),
    ("loss", "train/loss", _small),
    ("kl", "train/kl_loss", _small),
    ("entropy", "train/entropy", _plain(3)),
    ("grad", "train/grad_norm", _plain(2)),
    ("tok/s", "perf/rollout_tokens_per_second", lambda value: f"{value:,.0f}"),
    ("s", "time/step", _plain(1)),
)
"""Label, metric and format of what a step's line shows, in order."""

EVALUATION_FIELDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("EM", "em", _plain(3)),
    ("format", "format", _plain(3)),
    ("searches", "searches", _plain(2)),
    ("reward", "reward", _plain(3)),
    ("questions", "questions", _plain(0)),
)


def step_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """`step 3/60  reward 0.412  EM 0.31 ...`, or an empty string if `metrics` has no number of a step."""
    shown = _shown(STEP_FIELDS, metrics, "")
    return f"step {step:>{len(str(num_steps))}}/{num_steps}  {shown}" if shown else ""


def evaluation_lines(step: int, metrics: Mapping[str, float]) -> list[str]:
    """A line for each evaluated set: `eval demo/greedy after step 10  EM 0.810 ...`."""
    sets = sorted(
        {name.rsplit("/", 1)[0] for name in metrics if name.startswith("eval/") and name.endswith("/questions")}
    )
    when = f"after step {step}" if step else "before training"
    return [
        f"{name.replace('/', ' ', 1)} {when}  {_shown(EVALUATION_FIELDS, metrics, name + '/')}"
        for name in sets
        if "/source/" not in name
    ]


def _shown(
    fields: tuple[tuple[str, str, Callable[[float], str]], ...], metrics: Mapping[str, float], group: str
) -> str:
    return "  ".join(
        f"{label} {text(float(metrics[group + name]))}" for label, name, text in fields if group + name in metrics
    )
