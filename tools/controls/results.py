"""What came of the controls: a progress table, a figure, and a table in markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed, nor looked for

import matplotlib.pyplot as plt
from rich.table import Table

from sleuth.metrics.jsonl import read_metrics
from tools.controls.catalog import Control
from tools.plots import evaluation_metric, save_figure
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
class Result:
    """The numbers of a run that has ended.

    `columns` holds before and after for each of COLUMNS, None for a number that the run lacks; `curves` holds steps and
    values for each of PANELS.
    """

    control: str
    seed: int
    steps: int
    questions: int
    columns: dict[str, tuple[float | None, float | None]]
    curves: dict[str, tuple[list[int], list[float]]]


@dataclass(frozen=True, slots=True)
class Run:
    """One control with one seed; its files are in `folder`."""

    control: Control
    seed: int
    out: Path

    @property
    def folder(self) -> Path:
        return self.out / f"{self.control.name}-seed{self.seed}"

    def result(self, steps: int, questions: int) -> Result | None:
        """What came of the run, or None if it has not ended, or was of another size."""
        path = self.folder / "summary.json"
        if not path.is_file():
            return None
        summary = json.loads(path.read_text(encoding="utf-8"))
        if (summary["steps"], summary["questions"]) != (steps, questions):
            return None
        lines = read_metrics(self.folder / "metrics.jsonl")
        names = {title: evaluation_metric(lines, ending) for title, ending in PANELS.items()}
        curves = {title: metric_series(lines, name) if name else ([], []) for title, name in names.items()}
        columns = {column: _ends(summary, *place) for column, place in COLUMNS.items()}
        return Result(self.control.name, self.seed, steps, questions, columns, curves)


def _ends(summary: dict[str, Any], part: str, key: str) -> tuple[float | None, float | None]:
    row = (summary["table"] if part == "table" else summary["hops"][part])[key]
    return row["before"], row["after"]


def read_results(path: Path) -> list[Result]:
    """The results in a file of `write_results`; none if there is no file."""
    if not path.is_file():
        return []
    return [Result(**record) for record in json.loads(path.read_text(encoding="utf-8"))]


def write_results(path: Path, results: Sequence[Result]) -> None:
    """One line a run, so that a change shows which run it is of."""
    lines = [json.dumps(asdict(result)) for result in results]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def progress(runs: Sequence[Run], steps: int, questions: int) -> Table:
    """A line a run: done or not, exact match before and after, searches."""
    results = [run.result(steps, questions) for run in runs]
    table = Table(title=f"{sum(result is not None for result in results)} of {len(runs)} runs are done")
    for heading in ("control", "seed", "state", *COLUMNS):
        table.add_column(heading)
    for run, result in zip(runs, results, strict=True):
        cells = [_before_after([result], column) for column in COLUMNS] if result else [""] * len(COLUMNS)
        table.add_row(run.control.name, str(run.seed), "done" if result else "to do", *cells)
    return table


def markdown(controls: Sequence[Control], results: Sequence[Result]) -> str:
    """The table for docs/evidence.md (means and ranges over seeds), and a sentence for each control."""
    heads = ["control", "seeds", *COLUMNS]
    lines = ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads))]
    sentences = []
    for control in controls:
        own = [result for result in results if result.control == control.name]
        if own:
            cells = [_before_after(own, column) for column in COLUMNS]
            lines.append("| " + " | ".join([control.title, str(len(own)), *cells]) + " |")
            sentences.append(f"* **{control.title}** ({_flags(control)}): {control.expectation}")
    missing = [control.title for control in controls if all(result.control != control.name for result in results)]
    note = [f"Not run yet: {'; '.join(missing)}."] if missing else []
    return "\n".join([*lines, "", *sentences, "", *note]).rstrip() + "\n"


def _flags(control: Control) -> str:
    return f"`{' '.join(control.flags)}`" if control.flags else "no further flags"


def _before_after(results: Sequence[Result], column: str) -> str:
    """`0.05 -> 0.78`, each a mean over the runs; `missing` where a run lacks the number.

    Of several runs also the lowest and the highest number at the end: `0.05 -> 0.78 (0.74 to 0.81)`.
    """
    before, after = zip(*(result.columns[column] for result in results), strict=True)
    means = f"{_mean(before)} -> {_mean(after)}"
    ends = [value for value in after if value is not None]
    return f"{means} ({min(ends):.2f} to {max(ends):.2f})" if len(ends) > 1 else means


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.fmean(known):.2f}" if len(known) == len(values) else "missing"


def draw(controls: Sequence[Control], results: Sequence[Result], png: Path) -> None:
    """Three panels; a thin line for each run, a thick one for each control's mean over its seeds."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4.6 * len(PANELS), 4.4), layout="constrained")
    for ax, title in zip(axes, PANELS, strict=True):
        for i, control in enumerate(controls):
            series = [result.curves[title] for result in results if result.control == control.name]
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
    save_figure(figure, png)


def put_into(page: str, table: str) -> str:
    """The page with the table between its two marks. ValueError if the marks are not there."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected the lines {BEGIN!r} and {END!r} in the page, found no such pair; put them in")
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"
