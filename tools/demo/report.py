"""Reports what a run learned: a table of the evaluation before and after, `summary.json`, `curves.png`.

    python tools/demo/report.py --run-dir runs/demo/20260101-120000

Everything is read from the run's own files; a number that is not there is shown as missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sleuth.metrics.jsonl import MetricsLine, read_metrics
from tools.plots import evaluation_metric, plot_run
from tools.run_dir import read_configuration

EXACT_MATCH_GOAL = 0.25
"""By how much exact match at temperature 1 has to rise."""
GREEDY_TOLERANCE = 0.03
"""By how much greedy exact match may fall."""
FEWEST_STEPS = 10
"""A shorter run that misses the goal is too short to tell; the demo takes 40."""

ROWS = (
    ("Exact match, T = 1", "exact_match_t1", "/t1.0/em"),
    ("Exact match, greedy", "exact_match_greedy", "/greedy/em"),
    ("Valid format, T = 1", "format_t1", "/t1.0/format"),
    ("Searches per question, T = 1", "searches_t1", "/t1.0/searches"),
    ("Reward, T = 1", "reward_t1", "/t1.0/reward"),
)
"""Title, key in summary.json, end of the metric's name."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--started", type=float, help="unix time at which the run began; total seconds count from it")
    parser.add_argument("--require-goal", action="store_true", help="end with status 1 unless the goal was reached")
    options = parser.parse_args(argv)
    metrics_file = options.run_dir / "metrics.jsonl"
    if not metrics_file.is_file():
        parser.error(f"expected the metrics of a run in {metrics_file}, found no such file; check --run-dir")

    summary = summarize(read_metrics(metrics_file), read_configuration(options.run_dir), options.started)
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
    table = {key: _before_after(lines, ending) for _, key, ending in ROWS}
    steps = max((line["step"] for line in lines), default=0)
    return {
        "model": configuration.get("hf_checkpoint"),
        "seed": configuration.get("seed"),
        "steps": steps,
        "seconds": round(end - begin, 1) if begin is not None and end is not None else None,
        "questions": _before_after(lines, "/t1.0/questions")["after"],
        "table": table,
        "goal": judge(table, steps),
        "missing": [
            f"{title}, {when}" for title, key, _ in ROWS for when in ("before", "after") if table[key][when] is None
        ],
    }


def _before_after(lines: list[MetricsLine], ending: str) -> dict[str, float | None]:
    name = evaluation_metric(lines, ending)
    values = [(line["step"], line[name]) for line in lines if name and line.get(name) is not None]
    before = next((value for step, value in values if step == 0), None)
    after = values[-1][1] if values and values[-1][0] > 0 else None
    change = after - before if before is not None and after is not None else None
    return {"before": before, "after": after, "change": change}


def judge(table: dict[str, dict[str, float | None]], steps: int) -> dict[str, Any]:
    """Whether exact match rose enough and greedy exact match did not fall; None if a number is missing.

    If a run of fewer than FEWEST_STEPS does not reach the goal, `reached` is None instead of False.
    """
    rise, greedy = table["exact_match_t1"]["change"], table["exact_match_greedy"]["change"]
    rounding = 1e-9  # 0.35 - 0.10 is a little less than 0.25 in binary
    rose = None if rise is None else rise >= EXACT_MATCH_GOAL - rounding
    kept = None if greedy is None else greedy >= -GREEDY_TOLERANCE - rounding
    too_short = steps < FEWEST_STEPS
    return {
        "exact_match_t1_rises_by": EXACT_MATCH_GOAL,
        "exact_match_t1_rose": rose,
        "greedy_falls_by_at_most": GREEDY_TOLERANCE,
        "greedy_kept": kept,
        "reached": None if rose is None or kept is None else (rose and kept) or (None if too_short else False),
        "too_short_to_tell": too_short,
    }


def show(summary: dict[str, Any], run_dir: Path, console: Console) -> None:
    questions = summary["questions"]
    held_out = "number of questions missing" if questions is None else f"{questions:.0f} held-out questions"
    table = Table(title=f"Before and after {summary['steps']} steps ({held_out})")
    table.add_column("")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for title, key, _ in ROWS:
        row = summary["table"][key]
        table.add_row(title, _number(row["before"]), _number(row["after"]), _number(row["change"], signed=True))
    console.print(table)
    console.print(verdict(summary))
    seconds = summary["seconds"]
    console.print(f"model {summary['model'] or 'missing'}, seed {_plain(summary['seed'])}, seconds {_plain(seconds)}")
    console.print(f"details: {run_dir}", soft_wrap=True)


def verdict(summary: dict[str, Any]) -> str:
    """One sentence: the goal was reached, it was not and why, or why this cannot be said."""
    goal = summary["goal"]
    aim = f"exact match at T = 1 rises by {EXACT_MATCH_GOAL} and greedy falls by at most {GREEDY_TOLERANCE}"
    if goal["reached"] is None and not summary["missing"]:
        return (
            f"[yellow]goal ({aim}): {summary['steps']} steps are too few to tell; run at least {FEWEST_STEPS}[/yellow]"
        )
    if goal["reached"] is None:
        return f"[yellow]goal ({aim}): cannot be told; missing: {'; '.join(summary['missing'])}[/yellow]"
    if goal["reached"]:
        return f"[green]goal reached: {aim}[/green]"
    reasons = [] if goal["exact_match_t1_rose"] else ["exact match did not rise enough"]
    reasons += [] if goal["greedy_kept"] else ["greedy exact match fell"]
    return f"[red]goal not reached ({aim}): {' and '.join(reasons)}[/red]"


def _number(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "missing"
    return f"{value:+.3f}" if signed else f"{value:.3f}"


def _plain(value: object) -> str:
    return "missing" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
