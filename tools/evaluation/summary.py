"""The numbers of an evaluation: per data source, over all, and macro, each with its confidence interval.

The values of a trajectory are those that a run's own evaluation averages (`sleuth.metrics.rollout_metrics`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sleuth.metrics.rollout_metrics import data_source, evaluation_values
from sleuth.sample import Sample, StopReason
from tools.evaluation.statistics import Floats, Tally, interval, pass_at_k

ALL, MACRO = "all", "macro"
SEARCH_SUCCESS, SEARCH_LATENCY = "search_success", "search_latency"
Question = list[Sample]
"""The samples of one question."""

WIDEST = 1000
"""Columns of a terminal that a table may take."""
COLUMNS = {
    "em": ("EM", 3),
    "f1": ("F1", 3),
    "format": ("format", 3),
    "reward": ("reward", 3),
    "searches": ("searches", 2),
    "retrieval_hit": ("found", 3),
    SEARCH_SUCCESS: ("search ok", 3),
    SEARCH_LATENCY: ("s/search", 2),
    "seconds": ("s/answer", 2),
}
"""Heading and digits of the measures that the table shows; pass@k comes besides."""


def by_question(samples: Sequence[Sample]) -> list[Question]:
    """The samples of each question, in order."""
    groups: dict[int, Question] = defaultdict(list)
    for sample in samples:
        groups[sample.group_index].append(sample)
    return [groups[number] for number in sorted(groups)]


def tally(questions: Sequence[Question], failed: Sequence[Sample] = ()) -> Tally:
    """Every measure of the questions: means over samples, pass@k over questions, and how their searches went.

    `failed`: trajectories that were generated anew; those that a search failed count in `search_success`.
    """
    lost: dict[int, int] = defaultdict(int)
    for sample in failed:
        lost[sample.group_index] += sample.stop_reason == StopReason.SEARCH_FAILED
    rows = [_row(question, lost[question[0].group_index]) for question in questions]
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    pairs = np.array([[row.get(name, (0.0, 0.0)) for name in names] for row in rows], dtype=float)
    pairs = pairs.reshape(len(rows), len(names), 2)
    return Tally(names, pairs[:, :, 0], pairs[:, :, 1])


def _row(question: Question, lost: int) -> dict[str, tuple[float, float]]:
    """Numerator and denominator of each measure of a question."""
    values: dict[str, list[float]] = defaultdict(list)
    for sample in question:
        for name, value in evaluation_values(sample).items():
            values[name].append(value)
        searches, seconds = (sample.rollout_metrics.get(name, 0.0) for name in ("searches", "search_seconds"))
        if searches:
            values[SEARCH_LATENCY].append(seconds / searches)
    row = {name: (math.fsum(found), float(len(found))) for name, found in values.items()}
    if "em" in values and len(question) > 1:
        right = sum(value == 1 for value in values["em"])
        for k in _powers_of_two(len(question)):
            row[f"pass@{k}"] = (pass_at_k(len(question), right, k), 1.0)
    if "searches" in row and row["searches"][0] + lost:
        row[SEARCH_SUCCESS] = (row["searches"][0], row["searches"][0] + lost)
    return row


def _powers_of_two(samples: int) -> list[int]:
    """2, 4, 8, ... below the number of samples, and that number; pass@1 is the mean itself."""
    below = [2**i for i in range(1, samples.bit_length()) if 2**i < samples]
    return [*below, samples]


def summarize(samples: Sequence[Sample], failed: Sequence[Sample] = ()) -> dict[str, dict[str, Any]]:
    """For each data source, `all` and `macro`: how many questions, and of each measure value, low and high.

    A measure without a value is left out. `macro` is the mean over sources.
    """
    sources: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        sources[data_source(sample)].append(sample)
    tallies = {
        source: tally(by_question(members), [sample for sample in failed if data_source(sample) == source])
        for source, members in sorted(sources.items())
    }
    whole = tally(by_question(samples), failed)
    summary = {source: numbers(found, found.means(), found.draws) for source, found in tallies.items()}
    summary[ALL] = numbers(whole, whole.means(), whole.draws)
    means = np.stack([_aligned(found.means()[None], found.names, whole.names)[0] for found in tallies.values()])
    macro = np.stack([_aligned(found.draws, found.names, whole.names) for found in tallies.values()])
    summary[MACRO] = numbers(whole, _mean(means), _mean(macro))
    return summary


def _aligned(values: Floats, names: Sequence[str], wanted: Sequence[str]) -> Floats:
    """The columns of [R, M] in another order, NaN where one is missing."""
    aligned = np.full((len(values), len(wanted)), np.nan)
    for column, name in enumerate(names):
        aligned[:, wanted.index(name)] = values[:, column]
    return aligned


def _mean(values: Floats) -> Floats:
    """The mean over the first axis, of what is known."""
    known = ~np.isnan(values)
    counts = known.sum(0)
    total = np.where(known, values, 0.0).sum(0)
    return np.divide(total, counts, out=np.full(total.shape, np.nan), where=counts > 0)


def numbers(found: Tally, means: Floats, draws: Floats) -> dict[str, Any]:
    """How many questions, and of each measure with a value its value, low and high."""
    low, high = interval(draws)
    measures = {
        name: {"value": float(means[i]), "low": float(low[i]), "high": float(high[i])}
        for i, name in enumerate(found.names)
        if math.isfinite(means[i])
    }
    return {"questions": len(found.numerators), "measures": measures}


def table(title: str, summary: dict[str, dict[str, Any]]) -> Table:
    """The summary for a terminal: a row for each source, then all and macro; 95% intervals in brackets."""
    known = {name for found in summary.values() for name in found["measures"]}
    passes = sorted((name for name in known if name.startswith("pass@")), key=lambda name: int(name[5:]))
    columns = {name: column for name, column in COLUMNS.items() if name in known} | {name: (name, 3) for name in passes}
    shown = Table(title=title, title_justify="left")
    shown.add_column("source")
    shown.add_column("questions", justify="right")
    for heading, _ in columns.values():
        shown.add_column(heading, justify="right")
    sources = len(summary) - 2
    for name, found in summary.items():
        if name == MACRO and sources == 1:
            continue  # the same as all
        cells = [cell(found["measures"].get(measure), digits) for measure, (_, digits) in columns.items()]
        shown.add_row(name, str(found["questions"]), *cells, end_section=name == list(summary)[sources - 1])
    return shown


def print_whole(console: Console, shown: Table) -> None:
    """Print a table without cutting its cells, also where it is wider than the console: a pipe counts as 80 columns."""
    needed = Console(width=WIDEST).measure(shown).maximum
    wide = console if needed <= console.width else Console(width=needed, file=console.file)
    wide.print(shown)


def cell(measure: dict[str, float] | None, digits: int) -> str:
    """`0.412` above `[0.35, 0.47]`."""
    if measure is None:
        return "-"
    value, low, high = (f"{measure[part]:.{digits}f}" for part in ("value", "low", "high"))
    return f"{value}\n[{low}, {high}]"
