"""Draws the curves of several runs into one PNG, and prints their numbers before and after as a markdown table.

    python tools/plot_runs.py runs/demo/a runs/demo/b --output docs/images/demo_curves.png

Runs are named by the seed that their configuration holds, or by their folder. The table is made of their
`summary.json`, which tools/demo/report.py writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.plots import plot_runs
from tools.run_dir import read_configuration


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", type=Path, nargs="+", help="folders with a metrics.jsonl")
    parser.add_argument("--output", type=Path, required=True, help="the PNG to write")
    parser.add_argument("--labels", nargs="+", help="a name for each run [its seed or its folder]")
    options = parser.parse_args(argv)
    missing = [str(run) for run in options.run_dirs if not (run / "metrics.jsonl").is_file()]
    if missing:
        parser.error(f"expected a metrics.jsonl in every folder, found none in {', '.join(missing)}")
    labels = options.labels or default_labels(options.run_dirs)
    if len(labels) != len(options.run_dirs):
        parser.error(f"expected {len(options.run_dirs)} labels, one a run, found {len(labels)}")
    plot_runs([run / "metrics.jsonl" for run in options.run_dirs], options.output, labels)
    print("\n".join(markdown_table(options.run_dirs, labels)))
    return 0


COLUMNS = {
    "EM, greedy": ("table", "exact_match_greedy"),
    "EM, T = 1": ("table", "exact_match_t1"),
    "searches, one-hop": ("one_hop", "searches_t1"),
    "searches, two-hop": ("two_hop", "searches_t1"),
    "EM, greedy, two-hop": ("two_hop", "exact_match_greedy"),
    "EM, T = 1, two-hop": ("two_hop", "exact_match_t1"),
    "format, T = 1": ("table", "format_t1"),
}
"""Heading, part of summary.json, key in it."""


def markdown_table(run_dirs: Sequence[Path], labels: Sequence[str]) -> list[str]:
    """A line a run: each number before -> after, steps, and seconds; what is not known is said to be missing."""
    heads = ["run", *COLUMNS, "steps", "seconds"]
    lines = [heads, ["---"] * len(heads)]
    for run, label in zip(run_dirs, labels, strict=True):
        path = run / "summary.json"
        summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        parts = {"table": summary.get("table", {}), **summary.get("hops", {})}
        numbers = [_change(parts.get(part, {}).get(key, {})) for part, key in COLUMNS.values()]
        lines.append([label, *numbers, *(str(summary.get(key, "missing")) for key in ("steps", "seconds"))])
    return ["| " + " | ".join(line) + " |" for line in lines]


def _change(numbers: dict[str, float | None]) -> str:
    before, after = (numbers.get(when) for when in ("before", "after"))
    return " -> ".join("missing" if value is None else f"{value:.3f}" for value in (before, after))


def default_labels(run_dirs: Sequence[Path]) -> list[str]:
    """`seed 1`, ... if the runs' seeds differ, else the folders' names."""
    seeds = [read_configuration(run).get("seed") for run in run_dirs]
    if None not in seeds and len(set(seeds)) == len(seeds):
        return [f"seed {seed}" for seed in seeds]
    return [run.resolve().name for run in run_dirs]


if __name__ == "__main__":
    sys.exit(main())
