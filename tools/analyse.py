"""Compares evaluations of tools/eval.py: side by side, with paired tests, and question by question.

    python tools/analyse.py runs/eval/before.jsonl runs/eval/after.jsonl --png change.png --changes changes.md

Differences are to the first file, over the questions that all files have. Evaluations that differ in data, prompts,
sampling or search are refused, unless --allow names what is meant to differ. Exits with 2 where the input is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sleuth.metrics.trajectories import trajectory_markdown
from sleuth.rollout.hook_runner import UNUSABLE
from tools.evaluation.answers import Evaluation, sample_of
from tools.evaluation.comparison import KINDS, Comparison, Key, check_comparable, compare, described, key_of, parts_of
from tools.evaluation.statistics import Difference
from tools.evaluation.summary import COLUMNS, cell, print_whole
from tools.plots import save_figure

PLOTTED = ("em", "format", "searches")
COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d6a9f", "#c08497")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="two or more files of answers (.jsonl)")
    parser.add_argument("--labels", nargs="+", help="a name for each file [that of the file]")
    parser.add_argument("--measure", default="em", help="the measure that questions are counted by [em]")
    parser.add_argument("--allow", nargs="+", default=[], choices=list(KINDS), help="what may differ besides the model")
    parser.add_argument("--list", type=int, default=5, help="how many changed questions of each kind to list [5]")
    parser.add_argument("--changes", type=Path, help="markdown file for all changed questions with their trajectories")
    parser.add_argument("--png", type=Path, help="PNG to draw the comparison into")
    options = parser.parse_args(argv)
    labels = options.labels or _labels(options.files)
    if len(options.files) < 2:
        parser.error("expected two files or more, found one")
    if not len(set(labels)) == len(labels) == len(options.files):
        parser.error(f"--labels: expected {len(options.files)} different ones, found {' '.join(labels)}")
    if options.list < 0:
        parser.error(f"--list: expected 0 or more, found {options.list}")
    try:
        evaluations = [Evaluation.read(path) for path in options.files]
        for other in evaluations[1:]:
            check_comparable(evaluations[0], other, options.allow)
        comparisons = list(compare(evaluations))
        check_measure(comparisons, options.measure)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    console = Console()
    for evaluation in evaluations:
        if not evaluation.results:
            _say(console, f"warning: {evaluation.path} is not finished; the answers that it has are compared")
    for comparison in comparisons:
        report(console, comparison, labels, options.measure, options.list)
    try:
        if options.changes:
            options.changes.parent.mkdir(parents=True, exist_ok=True)
            options.changes.write_text(changes(comparisons, evaluations, labels, options.measure), encoding="utf-8")
            _say(console, f"changed questions with their trajectories: {options.changes}")
        if options.png:
            plot(comparisons, labels, options.png)
            _say(console, f"plot: {options.png}")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


def check_measure(comparisons: Sequence[Comparison], measure: str) -> None:
    """ValueError, with those that there are, if no evaluation has the measure."""
    numbers = range(len(comparisons[0].parts))
    known = {name for comparison in comparisons for number in numbers for name in comparison.measures(number)}
    if measure not in known:
        raise ValueError(f"--measure: expected one of {', '.join(sorted(known))}, found {measure}")


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)


def _labels(files: Sequence[Path]) -> list[str]:
    """The files' names, with their folders where names repeat."""
    stems = [path.stem for path in files]
    return stems if len(set(stems)) == len(files) else [str(path.with_suffix("")) for path in files]


def report(console: Console, comparison: Comparison, labels: Sequence[str], measure: str, listed: int) -> None:
    """Tables, tests and the questions that changed."""
    left_out = f" ({comparison.left_out} that not all have are left out)" if comparison.left_out else ""
    console.rule(f"{comparison.title}: {len(comparison.keys)} questions{left_out}")
    print_whole(console, side_by_side(comparison, labels))
    print_whole(console, by_source(comparison, labels, measure))
    for other in range(1, len(labels)):
        better, worse = comparison.changed(other, measure)
        text = f"{labels[other]} against {labels[0]}, {measure}: {len(better)} questions better, {len(worse)} worse"
        if measure == "em":
            name, p = comparison.p_value(other)
            text += f"; {name}: p = {p:.2g}"
        _say(console, text)
        for what, keys in (("better", better), ("worse", worse)):
            for key in keys[:listed]:
                _say(console, f"  {what}: {_change(comparison, other, key)}")
            if len(keys) > listed > 0:
                _say(console, f"  {what}: and {len(keys) - listed} more (--list, --changes)")


def _change(comparison: Comparison, other: int, key: Key) -> str:
    before, after = (described(comparison.parts[number].questions[key]) for number in (0, other))
    return f"{before['where']}: {' / '.join(before['answers'])} -> {' / '.join(after['answers'])} ({before['label']})"


def side_by_side(comparison: Comparison, labels: Sequence[str]) -> Table:
    """A row for each measure: the value of each evaluation, then the differences to the first."""
    numbers = [comparison.measures(number) for number in range(len(labels))]
    changed = [comparison.differences(other) for other in range(1, len(labels))]
    names = [*COLUMNS, *sorted({name for found in numbers for name in found} - set(COLUMNS))]
    table = _table("all questions", ["measure", *labels], labels)
    for name in names:
        if any(name in found for found in numbers):
            digits = COLUMNS.get(name, ("", 3))[1]
            values = [cell(found.get(name), digits) for found in numbers]
            table.add_row(name, *values, *(_difference(found.get(name), digits) for found in changed))
    return table


def by_source(comparison: Comparison, labels: Sequence[str], measure: str) -> Table:
    """A row for each data source: the measure of each evaluation, then the differences to the first."""
    digits = COLUMNS.get(measure, ("", 3))[1]
    table = _table(measure, ["source", "questions", *labels], labels)
    for scope, keys in comparison.scopes.items():
        values = [cell(comparison.measures(number, scope).get(measure), digits) for number in range(len(labels))]
        changed = [comparison.differences(other, scope).get(measure) for other in range(1, len(labels))]
        table.add_row(scope, str(len(keys)), *values, *(_difference(found, digits) for found in changed))
    return table


def _table(title: str, columns: Sequence[str], labels: Sequence[str]) -> Table:
    table = Table(title=f"{title} (in brackets: 95% intervals)", title_justify="left")
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for label in labels[1:]:
        table.add_column(f"{label} - {labels[0]}", justify="right")
    return table


def _difference(found: Difference | None, digits: int) -> str:
    if found is None or np.isnan(found.value):
        return "-"
    value, low, high = (f"{number:+.{digits}f}" for number in (found.value, found.low, found.high))
    return f"{value}\n[{low}, {high}]"


def changes(
    comparisons: Sequence[Comparison], evaluations: Sequence[Evaluation], labels: Sequence[str], measure: str
) -> str:
    """Markdown with every question that changed, and its first trajectory in both evaluations."""
    lines = [f"# Questions that changed: {', '.join(labels[1:])} against {labels[0]}\n"]
    records = [_by_key(evaluation) for evaluation in evaluations]
    for comparison in comparisons:
        for other in range(1, len(labels)):
            for what, keys in zip(("better", "worse"), comparison.changed(other, measure), strict=True):
                lines.append(f"# {comparison.title}, {labels[other]}: {len(keys)} {what}\n")
                for key in keys:
                    for number in (0, other):
                        part = comparison.parts[number]
                        record = records[number][part.name, part.temperature, key]
                        lines.append(f"**{labels[number]}**\n\n{trajectory_markdown(record)}")
    return "\n".join(lines)


def _by_key(evaluation: Evaluation) -> dict[tuple[str, float, Key], dict[str, Any]]:
    """The first whole trajectory of each question."""
    whole = {
        (name, temperature, key): question[0].index
        for (name, temperature), part in parts_of(evaluation).items()
        for key, question in part.questions.items()
    }
    found: dict[tuple[str, float, Key], dict[str, Any]] = {}
    for record in evaluation.records:
        place = (record["set"], record["temperature"], key_of(sample_of(record)))
        if whole.get(place) == record["index"] and record["status"] not in UNUSABLE:
            found[place] = record
    return found


def plot(comparisons: Sequence[Comparison], labels: Sequence[str], png: Path) -> None:
    """Bars with intervals: a row of panels for each comparison, a group of bars for each data source."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed, nor looked for
    import matplotlib.pyplot as plt

    rows, columns = len(comparisons), len(PLOTTED)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.2 * rows), layout="constrained", squeeze=False)
    for line, comparison in zip(axes, comparisons, strict=True):
        for ax, measure in zip(line, PLOTTED, strict=True):
            _draw(ax, comparison, labels, measure)
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    save_figure(figure, png)


def _draw(ax: Any, comparison: Comparison, labels: Sequence[str], measure: str) -> None:
    """A group of bars for each data source; no bar where the measure has no value."""
    width, scopes = 0.8 / len(labels), list(comparison.scopes)
    unknown = dict.fromkeys(("value", "low", "high"), np.nan)
    for number, label in enumerate(labels):
        found = [comparison.measures(number, scope).get(measure, unknown) for scope in scopes]
        values, low, high = (np.array([one[name] for one in found]) for name in unknown)
        places = np.arange(len(scopes)) + (number - (len(labels) - 1) / 2) * width
        ax.bar(places, values, width, label=label, color=COLOURS[number % len(COLOURS)])
        ax.errorbar(places, values, np.maximum(0, [values - low, high - values]), fmt="none", ecolor="black", capsize=2)
    ax.set_title(f"{comparison.title}: {measure}", fontsize=9, loc="left")
    ax.set_xticks(range(len(scopes)), scopes, fontsize=7, rotation=20)
    ax.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
