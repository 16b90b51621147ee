"""Draws the mismatch of engine and trainer, from runs with the hook mis.py.

    python tools/plot_mismatch.py weights --dump bfloat16=DIR --dump "10 steps behind=DIR" --output weights.png
    python tools/plot_mismatch.py runs --run "no correction=RUN_DIR" --run corrected=RUN_DIR --output runs.png

weights: how the log-ratios of trained tokens, and of samples, are distributed; a DIR is the `mis_dump_dir` of a run.
runs: exact match at temperature 1, and what the mismatch was, step by step. Several runs may have one name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed, nor looked for

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sleuth.metrics.jsonl import read_metrics
from tools.plots import evaluation_metric, save_figure
from tools.run_dir import metric_series

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d6a9f")
Named = list[tuple[str, Path]]


def log_ratios(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Trainer's minus engine's log-probability of every dumped token, and summed over each sample, in nats.

    Raises ValueError for a folder without files of `mis_dump_dir`.
    """
    files = sorted(folder.glob("rank*.npz"))
    if not files:
        raise ValueError(f"expected rank*.npz in {folder}, found none: set mis_dump_dir in a run's mis.yaml")
    tokens, samples = [], []
    for file in files:
        with np.load(file) as data:
            ratio = data["train"].astype(np.float64) - data["rollout"]
            tokens.append(ratio)
            samples.append(np.bincount(data["sample"], ratio)[np.unique(data["sample"])])
    return np.concatenate(tokens), np.concatenate(samples)


def plot_weights(dumps: Named) -> Figure:
    """Histograms of the log-ratios, one row a dump: of tokens on the left, of whole samples on the right."""
    figure, rows = plt.subplots(len(dumps), 2, figsize=(10, 2.6 * len(dumps)), layout="constrained", squeeze=False)
    for (name, folder), axes, colour in zip(dumps, rows, COLOURS, strict=False):
        for ax, values, what in zip(axes, log_ratios(folder), ("tokens", "samples"), strict=True):
            _histogram(ax, values, f"{name}: {len(values):,} {what}", colour)
    return figure


def _histogram(ax: Axes, values: np.ndarray, title: str, colour: str) -> None:
    reach = max(float(np.quantile(np.abs(values), 0.9995)), 1e-6)
    ax.hist(values, bins=np.linspace(-reach, reach, 121).tolist(), color=colour, log=True)
    for bound in (-np.log(2), np.log(2)):
        if abs(bound) <= reach:
            ax.axvline(bound, color="black", lw=0.8, ls="--")
    outside = float((np.abs(values) > np.log(2)).mean())
    ax.set_title(f"{title}; {outside:.2%} outside [1/2, 2]", fontsize=9, loc="left")
    ax.set_xlabel("log(trainer's / engine's probability), nats", fontsize=8)
    _dress(ax)


def plot_runs(runs: Named) -> Figure:
    """Exact match and mismatch of runs by step; runs of one name have one colour."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    names = list(dict.fromkeys(name for name, _ in runs))
    for name, run in runs:
        lines = read_metrics(run / "metrics.jsonl")
        colour, first = COLOURS[names.index(name) % len(COLOURS)], name not in left.get_legend_handles_labels()[1]
        metric = evaluation_metric(lines, "/t1.0/em")
        if metric:
            left.plot(*metric_series(lines, metric), "o-", ms=3, color=colour, label=name if first else None)
        steps, values = metric_series(lines, "train/train_rollout_logprob_abs_diff")
        right.plot(steps, np.maximum(values, 1e-6), color=colour, lw=1)
    left.set_title("Exact match at T = 1 (held out)", fontsize=9, loc="left")
    left.set_ylim(0.0, 1.0)
    right.set_title("Mean |trainer's - engine's log-probability|, nats", fontsize=9, loc="left")
    right.set_yscale("log")
    for ax in (left, right):
        ax.set_xlabel("step", fontsize=8)
        _dress(ax)
    left.legend(fontsize=8)
    return figure


def _dress(ax: Axes) -> None:
    ax.tick_params(labelsize=7)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def _named(text: str) -> tuple[str, Path]:
    name, equals, path = text.rpartition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=FOLDER, found {text}")
    return name, Path(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command, flag, what in (("weights", "--dump", "a folder of mis_dump_dir"), ("runs", "--run", "a run's folder")):
        sub = commands.add_parser(command)
        sub.add_argument(flag, dest="named", type=_named, action="append", required=True, help=f"NAME={what}")
        sub.add_argument("--output", type=Path, required=True, help="the PNG to write")
    options = parser.parse_args(argv)
    try:
        figure = plot_weights(options.named) if options.command == "weights" else plot_runs(options.named)
        save_figure(figure, options.output)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
