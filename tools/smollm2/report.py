"""Reports a run of `run_smollm2.sh`: held-out questions as the model came, after the warm-up, after reinforcement.

    python tools/smollm2/report.py --zero-shot runs/smollm2/zero-shot --run-dir runs/smollm2/<start time>

Everything is read from the runs' own files; a number that is not there is shown as missing. Writes `summary.json` and
`curves.png` into the run's folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sleuth.metrics.jsonl import MetricsLine, read_metrics
from tools.plots import evaluation_metric, plot_run

MODES = {"greedy": "/greedy", "t1": "/t1.0"}
"""Names of the evaluations in the summary, and in the metrics."""
ROWS = {
    "exact match": ("/em", "reward/exact_match"),
    "valid format": ("/format", "reward/valid_format"),
    "searches per question": ("/searches", "rollout/searches"),
}
"""Each with the end of its metric's name in an evaluation, and its metric of a rollout."""
STAGES = ("zero-shot", "warm-up", "reinforcement")

Summary = dict[str, dict[str, dict[str, float | None]]]
"""mode -> row -> stage -> number."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero-shot", type=Path, required=True, help="folder with the runs greedy/ and t1/")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--started", type=float, help="unix time at which the run began; seconds count from it")
    options = parser.parse_args(argv)
    metrics_file = options.run_dir / "metrics.jsonl"
    if not metrics_file.is_file():
        parser.error(f"expected the metrics of a run in {metrics_file}, found no such file; check --run-dir")
    try:
        lines = read_metrics(metrics_file)
        summary = summarize(lines, options.zero_shot)
    except ValueError as error:
        parser.error(str(error))
    seconds = round(time.time() - options.started, 1) if options.started else None
    steps = max((line["step"] for line in lines), default=0)
    found = {"steps": steps, "seconds": seconds, "table": summary}
    (options.run_dir / "summary.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    plot_run(metrics_file, options.run_dir / "curves.png")
    console = Console()
    console.print(as_table(summary, steps))
    console.print(f"seconds {seconds or 'missing'}; details: {options.run_dir}", soft_wrap=True)
    return 0


def summarize(lines: list[MetricsLine], zero_shot: Path) -> Summary:
    """The numbers of all stages; None where one is missing."""
    summary: Summary = {}
    for mode, ending in MODES.items():
        path = zero_shot / mode / "metrics.jsonl"
        before = next(reversed(read_metrics(path)), {}) if path.is_file() else {}
        summary[mode] = {
            row: {"zero-shot": before.get(rollout), **_of_the_run(lines, ending + evaluated)}
            for row, (evaluated, rollout) in ROWS.items()
        }
    return summary


def _of_the_run(lines: list[MetricsLine], ending: str) -> dict[str, float | None]:
    """What step 0 and the last later step that was evaluated say."""
    name = evaluation_metric(lines, ending)
    values = {line["step"]: line[name] for line in lines if name and line.get(name) is not None}
    last = max(values, default=0)
    return {"warm-up": values.get(0), "reinforcement": values[last] if last else None}


def as_table(summary: Summary, steps: int) -> Table:
    table = Table(title=f"Held-out questions: as it came, after the warm-up, after {steps} steps of reinforcement")
    table.add_column("")
    for stage in STAGES:
        table.add_column(stage, justify="right")
    for mode, rows in summary.items():
        for row, numbers in rows.items():
            cells = ("missing" if (number := numbers[stage]) is None else f"{number:.3f}" for stage in STAGES)
            table.add_row(f"{row}, {'T = 1' if mode == 't1' else mode}", *cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
