"""Draws the curves of several runs into one PNG, and prints their numbers before and after as a markdown table.

    python tools/plot_runs.py runs/demo/a runs/demo/b --output docs/images/demo_curves.png
    python tools/plot_runs.py runs/a runs/b --output entropy.png --metric train/entropy --metric search/latency_p95

Runs are named by their folders, and what differs between their configurations is printed. A thick line is their mean
where nothing but the seed differs: then they are repetitions of one experiment. The table is made of their
`summary.json`, which tools/demo/report.py writes; without one there is no table.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sleuth.metrics.jsonl import read_metrics
from sleuth.viewer.runs import differing, named_runs
from tools.plots import plot_runs
from tools.run_dir import read_configuration, read_summary


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", type=Path, nargs="+", help="folders with a metrics.jsonl")
    parser.add_argument("--output", type=Path, required=True, help="the PNG to write")
    parser.add_argument("--labels", nargs="+", help="a name for each run [its folder]")
    parser.add_argument("--metric", action="append", default=[], help="a metric to draw, in place of the usual ones")
    options = parser.parse_args(argv)
    missing = [str(run) for run in options.run_dirs if not (run / "metrics.jsonl").is_file()]
    if missing:
        parser.error(f"expected a metrics.jsonl in every folder, found none in {', '.join(missing)}")
    if len({run.resolve() for run in options.run_dirs}) < len(options.run_dirs):
        parser.error("expected different runs, found the same folder twice; name each once")
    labels = options.labels or default_labels(options.run_dirs)
    if not len(set(labels)) == len(labels) == len(options.run_dirs):
        parser.error(
            f"--labels: expected {len(options.run_dirs)} different labels, one a run, found {' '.join(labels)}"
        )
    try:
        check_metrics(options.run_dirs, options.metric)
        configurations = [read_configuration(run) for run in options.run_dirs]
        table = markdown_table(options.run_dirs, labels)
        differences = differing(configurations)
        plot_runs(
            [run / "metrics.jsonl" for run in options.run_dirs],
            options.output,
            labels,
            mean=all(configurations) and are_repetitions(differences),
            metrics=options.metric,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for label, configuration in zip(labels, configurations, strict=True):
        if not configuration and len(labels) > 1:
            print(f"{label} has no config.yaml: whether its settings are those of the others is not known")
    for name, values in differences.items():
        print(f"{name}: {', '.join(f'{label} {value}' for label, value in zip(labels, values, strict=True))}")
    print("\n".join(table))
    return 0


def check_metrics(run_dirs: Sequence[Path], metrics: Sequence[str]) -> None:
    """ValueError, with similar names, for a metric that no run logged as a number."""
    lines = [line for run in run_dirs for line in read_metrics(run / "metrics.jsonl")]
    logged = {name for line in lines for name, value in line.items() if isinstance(value, int | float)}
    if unknown := [name for name in metrics if name not in logged]:
        near = sorted({name for word in unknown for name in difflib.get_close_matches(word, logged, 3)})
        hint = f"did you mean {', '.join(near)}?" if near else "metrics.jsonl has the names"
        raise ValueError(f"--metric: no run logged {', '.join(unknown)}; {hint}")


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
    """A line a run: each number before -> after, steps, and seconds; what is not known is said to be missing.

    No lines if no run has a summary. ValueError for one that is damaged.
    """
    summaries = [read_summary(run) for run in run_dirs]
    if not any(summaries):
        return []
    heads = ["run", *COLUMNS, "steps", "seconds"]
    lines = [heads, ["---"] * len(heads)]
    for summary, label in zip(summaries, labels, strict=True):
        parts = {"table": summary.get("table", {}), **summary.get("hops", {})}
        numbers = [_change(parts.get(part, {}).get(key, {})) for part, key in COLUMNS.values()]
        lines.append([label, *numbers, *(str(summary.get(key, "missing")) for key in ("steps", "seconds"))])
    return ["| " + " | ".join(line) + " |" for line in lines]


def _change(numbers: dict[str, float | None]) -> str:
    before, after = (numbers.get(when) for when in ("before", "after"))
    return " -> ".join("missing" if value is None else f"{value:.3f}" for value in (before, after))


PLACES = {"run_dir", "save", "custom_config_path", "ref_load"}
"""Settings that say where a run keeps what is its own: repetitions may differ in them."""


def are_repetitions(differences: Mapping[str, Sequence[Any]]) -> bool:
    """Whether runs with these differing settings are repetitions of one experiment with other seeds."""
    return set(differences) - PLACES <= {"seed"}


def default_labels(run_dirs: Sequence[Path]) -> list[str]:
    """The shortest ends of the folders' paths that tell them apart."""
    return [run.name for run in named_runs(run_dirs)]


if __name__ == "__main__":
    sys.exit(main())
