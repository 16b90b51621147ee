"""Reports what a run learned: the evaluation before and after, three questions, `summary.json`, `curves.png`.

    python tools/demo/report.py --run-dir runs/demo/20260101-120000

Everything is read from the run's own files; a number that is not there is shown as missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sleuth.metrics.jsonl import MetricsLine, read_metrics
from tools.demo.side_by_side import side_by_side
from tools.plots import evaluation_metric, plot_run
from tools.run_dir import read_configuration

LEAST_RISE = {"exact_match_greedy": 0.6, "exact_match_t1": 0.35}
"""By how much these numbers have to rise over all questions: the demo's promise."""
FEWEST_STEPS = 30
"""A shorter run that misses the goal is too short to tell; the demo takes 40."""

ROWS = (
    ("Exact match, greedy", "exact_match_greedy", "/greedy/", "em"),
    ("Exact match, T = 1", "exact_match_t1", "/t1.0/", "em"),
    ("Searches per question, T = 1", "searches_t1", "/t1.0/", "searches"),
    ("Valid format, T = 1", "format_t1", "/t1.0/", "format"),  # with tool calls, a final answer: see _all
    ("Reward, T = 1", "reward_t1", "/t1.0/", "reward"),
)
"""Title, key in summary.json, the part of the metric's name that names the temperature, its last part."""
TWO_HOP = "demo_two_hop"
"""The data source of the two-hop questions; all others are one-hop."""
HOPS = {"all": "all questions", "one_hop": "one-hop", "two_hop": "two-hop"}
HOP_ROWS = ("exact_match_greedy", "exact_match_t1", "searches_t1")
"""What the table shows for one-hop and two-hop questions apart."""

Change = dict[str, float | None]
"""A number `before`, `after`, and its `change`; None where it is not known."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--started", type=float, help="unix time at which the run began; total seconds count from it")
    parser.add_argument("--require-goal", action="store_true", help="end with status 1 unless the goal was reached")
    options = parser.parse_args(argv)
    metrics_file = options.run_dir / "metrics.jsonl"
    if not metrics_file.is_file():
        parser.error(f"expected the metrics of a run in {metrics_file}, found no such file; check --run-dir")

    try:
        summary = summarize(read_metrics(metrics_file), read_configuration(options.run_dir), options.started)
    except ValueError as error:
        parser.error(str(error))
    (options.run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    plot_run(metrics_file, options.run_dir / "curves.png")
    show(summary, options.run_dir, Console())
    return 1 if options.require_goal and summary["goal"]["reached"] is not True else 0


def summarize(
    lines: list[MetricsLine], configuration: dict[str, Any], started: float | None = None, now: float | None = None
) -> dict[str, Any]:
    """The content of `summary.json`. `before` is step 0, `after` the last step that was evaluated.

    Seconds run from `started` (the first metrics line if that is not known) to `now`
    (the last metrics line).
    """
    timestamps = [line["timestamp"] for line in lines if isinstance(line.get("timestamp"), int | float)]
    begin = started if started is not None else min(timestamps, default=None)
    end = (now or time.time()) if started is not None else max(timestamps, default=None)
    table = {key: _change(lines, _all(lines, f"{part}{end}")) for _, key, part, end in ROWS}
    steps = max((line["step"] for line in lines), default=0)
    return {
        "model": configuration.get("hf_checkpoint"),
        "seed": configuration.get("seed"),
        "steps": steps,
        "seconds": round(end - begin, 1) if begin is not None and end is not None else None,
        "questions": _change(lines, _all(lines, "/t1.0/questions"))["after"],
        "table": table,
        "hops": {hop: _of_hop(lines, two=hop == "two_hop") for hop in HOPS if hop != "all"},
        "goal": judge(table, steps),
        "missing": [
            f"{title}, {when}" for title, key, *_ in ROWS for when in ("before", "after") if table[key][when] is None
        ],
    }


def _all(lines: list[MetricsLine], ending: str) -> Callable[[MetricsLine], float | None]:
    name = evaluation_metric(lines, ending)
    if name is None and ending.endswith("/format"):  # generate_with_tools asks for no more than a final answer
        name = evaluation_metric(lines, ending.replace("/format", "/answered"))
    return lambda line: line.get(name) if name else None


def _of_hop(lines: list[MetricsLine], *, two: bool) -> dict[str, Change]:
    """The rows of the table for two-hop questions, or for all others; `questions` says how many there are."""
    rows = {key: (part, end) for _, key, part, end in ROWS if key in HOP_ROWS}
    table = {
        key: _change(lines, partial(_over_sources, part=part, end=end, two=two)) for key, (part, end) in rows.items()
    }
    count = _change(lines, lambda line: sum(_source_counts(line, "/t1.0/", two=two).values()) or None)
    return table | {"questions": count}


def _source_counts(line: MetricsLine, part: str, *, two: bool) -> dict[str, float]:
    """How many questions each data source has, by the beginning of the source's metrics."""
    return {
        name.removesuffix("questions"): count
        for name, count in line.items()
        if name.startswith("eval/") and f"{part}source/" in name and name.endswith("/questions")
        if (name.split("/")[-2] == TWO_HOP) == two
    }


def _over_sources(line: MetricsLine, part: str, end: str, *, two: bool) -> float | None:
    counts = _source_counts(line, part, two=two)
    values = {source: line[source + end] for source in counts if source + end in line}
    if not counts or len(values) < len(counts):
        return None
    return sum(counts[source] * values[source] for source in counts) / sum(counts.values())


def _change(lines: list[MetricsLine], value_of: Callable[[MetricsLine], float | None]) -> Change:
    values = [(line["step"], value) for line in lines if (value := value_of(line)) is not None]
    before = next((value for step, value in values if step == 0), None)
    after = values[-1][1] if values and values[-1][0] > 0 else None
    change = after - before if before is not None and after is not None else None
    return {"before": before, "after": after, "change": change}


def judge(table: dict[str, Change], steps: int) -> dict[str, Any]:
    """Whether the numbers of LEAST_RISE rose enough; None if one is missing.

    If a run of fewer than FEWEST_STEPS does not reach the goal, `reached` is None instead of False.
    """
    rounding = 1e-9  # 0.35 - 0.10 is a little less than 0.25 in binary
    rises = {key: table[key]["change"] for key in LEAST_RISE}
    rose = {key: None if rise is None else rise >= LEAST_RISE[key] - rounding for key, rise in rises.items()}
    too_short = steps < FEWEST_STEPS
    reached = None if None in rose.values() else all(rose.values()) or (None if too_short else False)
    return {"least_rise": LEAST_RISE, "rose": rose, "reached": reached, "too_short_to_tell": too_short}


def show(summary: dict[str, Any], run_dir: Path, console: Console) -> None:
    console.print(_table(summary))
    console.print(verdict(summary))
    for panel in side_by_side(run_dir):
        console.print(panel)
    seconds = summary["seconds"]
    console.print(f"model {summary['model'] or 'missing'}, seed {_plain(summary['seed'])}, seconds {_plain(seconds)}")
    console.print(WHERE_NEXT.format(run=run_dir), soft_wrap=True, markup=False, highlight=False)


WHERE_NEXT = """Where to look next:
  {run}/curves.png       the curves
  {run}/trajectories/    what the model wrote, step by step; in colour: python tools/view_trajectories.py {run}
  {run}/hf               the trained model, for transformers
  docs/evidence.md       what this shows, and the controls: what does not teach the model to search
  generate_with_search.py, qa_em_format.py    the conversation and the reward, to copy and change"""


def _table(summary: dict[str, Any]) -> Table:
    questions = summary["questions"]
    held_out = "number of questions missing" if questions is None else f"{questions:.0f} held-out questions"
    table = Table(title=f"Before and after {summary['steps']} steps ({held_out})")
    table.add_column("")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for title, key, *_ in ROWS:
        _add_row(table, title, summary["table"][key])
    titles = {key: title for title, key, *_ in ROWS}
    for hop, numbers in summary["hops"].items():
        count = numbers["questions"]["after"]
        table.add_section()
        table.add_row(f"[bold]{HOPS[hop]} ({'number missing' if count is None else f'{count:.0f} questions'})[/bold]")
        for key in HOP_ROWS:
            _add_row(table, titles[key], numbers[key])
    return table


def _add_row(table: Table, title: str, row: Change) -> None:
    table.add_row(title, _number(row["before"]), _number(row["after"]), _number(row["change"], signed=True))


def verdict(summary: dict[str, Any]) -> str:
    """One sentence: the goal was reached, it was not and why, or why this cannot be said."""
    goal = summary["goal"]
    titles = {key: title[0].lower() + title[1:] for title, key, *_ in ROWS}
    aim = " and ".join(f"{titles[key]} rises by {rise}" for key, rise in LEAST_RISE.items())
    if goal["reached"] is None and not summary["missing"]:
        return (
            f"[yellow]goal ({aim}): {summary['steps']} steps are too few to tell; run at least {FEWEST_STEPS}[/yellow]"
        )
    if goal["reached"] is None:
        return f"[yellow]goal ({aim}): cannot be told; missing: {'; '.join(summary['missing'])}[/yellow]"
    if goal["reached"]:
        return f"[green]goal reached: {aim}[/green]"
    reasons = [f"{titles[key]} did not" for key, rose in goal["rose"].items() if not rose]
    return f"[red]goal not reached ({aim}): {' and '.join(reasons)}[/red]"


def _number(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "missing"
    return f"{value:+.3f}" if signed else f"{value:.3f}"


def _plain(value: object) -> str:
    return "missing" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
