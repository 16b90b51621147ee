"""What came of the controls: a progress table, a figure, and a table in markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed, nor looked for

import matplotlib.pyplot as plt
from rich.table import Table

from sleuth.metrics.jsonl import read_metrics
from tools.controls.catalog import Control
from tools.plots import evaluation_metric
from tools.run_dir import metric_series

BEGIN, END = "<!-- controls: made by tools/run_controls.py -->", "<!-- end of controls -->"
COLUMNS = {
    "EM, greedy": ("table", "exact_match_greedy"),
    "EM, T = 1": ("table", "exact_match_t1"),
    "searches, one-hop": ("one_hop", "searches_t1"),
    "searches, two-hop": ("two_hop", "searches_t1"),
    "format": ("table", "format_t1"),
}
PANELS = {
    "Exact match, greedy": "/greedy/em",
    "Exact match, T = 1": "/t1.0/em",
    "Searches per question, T = 1": "/t1.0/searches",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One control with one seed; its results are in `folder`."""

    control: Control
    seed: int
    out: Path

    @property
    def folder(self) -> Path:
        return self.out / f"{self.control.name}-seed{self.seed}"

    def summary(self) -> dict[str, Any] | None:
        """What the run's report says, or None if the run has not ended."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def is_done(self, steps: int) -> bool:
        summary = self.summary()
        return summary is not None and summary["steps"] == steps


def progress(runs: Sequence[Run], steps: int) -> Table:
    """A line a run: done or not, exact match before and after, searches."""
    table = Table(title=f"{sum(run.is_done(steps) for run in runs)} of {len(runs)} runs are done")
    for heading in ("control", "seed", "state", *COLUMNS):
        table.add_column(heading)
    for run in runs:
        summary = run.summary() if run.is_done(steps) else None
        cells = [_before_after([summary], column) for column in COLUMNS] if summary else [""] * len(COLUMNS)
        table.add_row(run.control.name, str(run.seed), "done" if summary else "to do", *cells)
    return table


def markdown(controls: Sequence[Control], done: Sequence[Run]) -> str:
    """The table for docs/evidence.md (means and ranges over seeds), and a sentence for each control."""
    heads = ["control", "seeds", *COLUMNS]
    lines = ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads))]
    sentences = []
    for control in controls:
        summaries = [summary for run in done if run.control is control and (summary := run.summary())]
        if summaries:
            cells = [_before_after(summaries, column) for column in COLUMNS]
            lines.append("| " + " | ".join([control.title, str(len(summaries)), *cells]) + " |")
            sentences.append(f"* **{control.title}** ({_flags(control)}): {control.expectation}")
    missing = [control.title for control in controls if not any(run.control is control for run in done)]
    note = [f"Not run yet: {'; '.join(missing)}."] if missing else []
    return "\n".join([*lines, "", *sentences, "", *note]).rstrip() + "\n"


def _flags(control: Control) -> str:
    return f"`{' '.join(control.flags)}`" if control.flags else "no further flags"


def _before_after(summaries: Sequence[dict[str, Any]], column: str) -> str:
    """`0.05 -> 0.78`, each a mean over the runs; `missing` where a run lacks the number.

    Of several runs also the lowest and the highest number at the end: `0.05 -> 0.78 (0.74 to 0.81)`.
    """
    part, key = COLUMNS[column]
    rows = [(summary["table"] if part == "table" else summary["hops"][part])[key] for summary in summaries]
    means = " -> ".join(_mean([row[when] for row in rows]) for when in ("before", "after"))
    ends = [row["after"] for row in rows if row["after"] is not None]
    return f"{means} ({min(ends):.2f} to {max(ends):.2f})" if len(ends) > 1 else means


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.fmean(known):.2f}" if len(known) == len(values) else "missing"


def draw(controls: Sequence[Control], done: Sequence[Run], png: Path) -> None:
    """Three panels; a thin line for each run, a thick one for each control's mean over its seeds."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4.6 * len(PANELS), 4.4), layout="constrained")
    for ax, (title, ending) in zip(axes, PANELS.items(), strict=True):
        for i, control in enumerate(controls):
            series = [_series(run, ending) for run in done if run.control is control]
            for steps, values in series:
                ax.plot(steps, values, color=f"C{i}", lw=0.7, alpha=0.6)
            if series:
                steps = sorted(set.intersection(*(set(steps) for steps, _ in series)))
                tables = [dict(zip(*pair, strict=True)) for pair in series]
                means = [statistics.fmean(table[step] for table in tables) for step in steps]
                ax.plot(steps, means, color=f"C{i}", lw=2, marker="o", ms=3, label=control.title.partition(":")[0])
        ax.set_title(title, fontsize=9, loc="left")
        ax.set_xlabel("step", fontsize=8)
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(png, dpi=110)
    plt.close(figure)


def _series(run: Run, ending: str) -> tuple[list[int], list[float]]:
    lines = read_metrics(run.folder / "metrics.jsonl")
    name = evaluation_metric(lines, ending)
    return metric_series(lines, name) if name else ([], [])


def put_into(page: str, table: str) -> str:
    """The page with the table between its two marks. ValueError if the marks are not there."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected the lines {BEGIN!r} and {END!r} in the page, found no such pair; put them in")
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"
