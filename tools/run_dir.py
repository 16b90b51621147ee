"""Reads the folder of a finished run, for the tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from sleuth.metrics.jsonl import MetricsLine


def read_configuration(run_dir: Path) -> dict[str, Any]:
    """The resolved configuration, which the run saved as `config.yaml`; empty if there is no such file.

    ValueError for a file that holds something else.
    """
    return _mapping(run_dir / "config.yaml", yaml.safe_load, "settings of a run, as YAML")


def read_summary(run_dir: Path) -> dict[str, Any]:
    """`summary.json`, which tools/demo/report.py wrote; empty if there is no such file, ValueError as above."""
    return _mapping(run_dir / "summary.json", json.loads, "the JSON that tools/demo/report.py writes")


def _mapping(path: Path, parse: Callable[[str], Any], what: str) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        reason = str(error).partition("\n")[0]
    else:
        if isinstance(found, dict):
            return found
        reason = f"found {type(found).__name__}"
    raise ValueError(f"expected {what} in {path}, which has none ({reason}); restore the file, or remove it")


def metric_series(lines: list[MetricsLine], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, for the steps at which it was logged as a number."""
    pairs = [(line["step"], float(line[name])) for line in lines if isinstance(line.get(name), int | float)]
    return [step for step, _ in pairs], [value for _, value in pairs]
