"""Curves of a run, or of several runs of different seeds, as small multiples in one PNG."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed, nor looked for

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from sleuth.metrics.jsonl import MetricsLine, read_metrics
from tools.run_dir import metric_series


@dataclass(frozen=True, slots=True)
class Panel:
    """One small plot. `metric` is a name, or for evaluations the end of a name such as `/t1.0/em`."""

    title: str
    metric: str
    unit: str = ""
    logarithmic: bool = False


EVALUATION_PANELS = (
    Panel("Exact match at T = 1 (held out)", "/t1.0/em", "share"),
    Panel("Exact match, greedy (held out)", "/greedy/em", "share"),
    Panel("Valid format at T = 1 (held out)", "/t1.0/format", "share"),
    Panel("Searches at T = 1 (held out)", "/t1.0/searches", "per question"),
)
TRAINING_PANELS = (
    Panel("Reward, training", "reward/mean"),
    Panel("Valid format, training", "reward/valid_format", "share"),
    Panel("Response length", "rollout/response_length/mean", "tokens"),
    Panel("KL to the reference", "train/kl_loss", "nats"),
    Panel("Gradient norm", "train/grad_norm", logarithmic=True),
    Panel("Seconds per step", "time/step", "s"),
)
PANELS = (*EVALUATION_PANELS, *TRAINING_PANELS)

_COLUMNS = 5
_COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d6a9f", "#c08497")
_NOT_LOGGED = "not logged in this run"


def plot_run(metrics_jsonl: str | Path, png: str | Path) -> None:
    """Draw the curves of one run; a metric that was not logged is an empty plot that says so."""
    _draw({Path(metrics_jsonl).parent.name: read_metrics(metrics_jsonl)}, png)


def plot_runs(
    metrics_jsonls: Sequence[str | Path],
    png: str | Path,
    labels: Sequence[str] | None = None,
    *,
    mean: bool = True,
    metrics: Sequence[str] = (),
) -> None:
    """Draw several runs into the same plots: a thin line for each, and with `mean` a thick one for their mean.

    The mean is over the steps that all runs have. `labels` name the runs; by default a run has the name of its folder.
    `metrics` are the names of those to draw, in place of the usual ones.
    """
    names = list(labels) if labels else [Path(path).parent.name for path in metrics_jsonls]
    if len(set(names)) < len(metrics_jsonls):
        raise ValueError(f"expected {len(metrics_jsonls)} different labels, found {names}; pass `labels`")
    runs = {name: read_metrics(path) for name, path in zip(names, metrics_jsonls, strict=True)}
    _draw(runs, png, mean=mean, panels=[Panel(name, name) for name in metrics] or PANELS)


def evaluation_metric(lines: Sequence[MetricsLine], ending: str) -> str | None:
    """The full name of the evaluation metric with this ending, of the first evaluated set; None if there is none."""
    names = [name for line in lines for name in line if name.startswith("eval/") and name.endswith(ending)]
    plain = [name for name in names if "/source/" not in name and "/macro/" not in name]
    return plain[0] if plain else None


def panel_series(lines: list[MetricsLine], panel: Panel) -> tuple[list[int], list[float]]:
    """Steps and values of a panel's metric in one run; empty lists if it was not logged."""
    name = evaluation_metric(lines, panel.metric) if panel.metric.startswith("/") else panel.metric
    return metric_series(lines, name) if name else ([], [])


def _draw(
    runs: dict[str, list[MetricsLine]], png: str | Path, *, mean: bool = True, panels: Sequence[Panel] = PANELS
) -> None:
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    size = (3.1 * max(columns, 2), 2.6 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for ax, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(ax, panel, runs, mean=mean)
    for spare in list(axes.flat)[len(panels) :]:
        spare.axis("off")
    if len(runs) > 1:
        handles, names = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    save_figure(figure, png)


def save_figure(figure: Figure, png: str | Path) -> None:
    """Write the picture, and its folder where there is none. ValueError if that is not possible."""
    try:
        Path(png).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, dpi=110)
    except (OSError, ValueError) as error:  # ValueError: an ending of no known format
        raise ValueError(
            f"expected the name of a PNG that can be written, found {png} ({error}); name another"
        ) from None
    finally:
        plt.close(figure)


def _draw_panel(ax: Axes, panel: Panel, runs: dict[str, list[MetricsLine]], *, mean: bool) -> None:
    series = {name: panel_series(lines, panel) for name, lines in runs.items()}
    thin = len(runs) > 1
    for i, (name, (steps, values)) in enumerate(series.items()):
        marker = "o" if panel.metric.startswith("/") else None
        colour = _COLOURS[i % len(_COLOURS)]
        ax.plot(steps, values, color=colour, label=name, marker=marker, ms=3, lw=1 if thin else 1.8)
    if thin and mean:
        steps, values = shared_mean(list(series.values()))
        ax.plot(steps, values, color="black", label="mean", lw=2.2)
    if not any(values for _, values in series.values()):
        ax.text(0.5, 0.5, _NOT_LOGGED, transform=ax.transAxes, ha="center", color="grey", fontsize=8)
    _dress(ax, panel)


def shared_mean(series: Sequence[tuple[list[int], list[float]]]) -> tuple[list[int], list[float]]:
    """Steps that all runs have, and the mean over runs at each."""
    tables = [dict(zip(steps, values, strict=True)) for steps, values in series]
    shared = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    return shared, [statistics.fmean(table[step] for table in tables) for step in shared]


def _dress(ax: Axes, panel: Panel) -> None:
    ax.set_title(panel.title, fontsize=9, loc="left")
    ax.set_xlabel("step", fontsize=8)
    ax.set_ylabel(panel.unit, fontsize=8)
    ax.tick_params(which="both", labelsize=7)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if panel.unit == "share":
        ax.set_ylim(-0.03, 1.03)
    elif panel.logarithmic and any(_has_positive(line) for line in ax.lines):
        ax.set_yscale("log")
    else:
        bottom, top = ax.get_ylim()
        bottom = min(0.0, bottom)
        ax.set_ylim(bottom, top + 0.05 * (top - bottom))  # the highest marker is seen whole


def _has_positive(line: Line2D) -> bool:
    return bool((np.asarray(line.get_ydata(), dtype=float) > 0).any())
