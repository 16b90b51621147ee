"""Reads the folder of a finished run, for the tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sleuth.metrics.jsonl import MetricsLine


def read_configuration(run_dir: Path) -> dict[str, Any]:
    """The resolved configuration, which the run saved as `config.yaml`; empty if there is no such file."""
    path = run_dir / "config.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}


def metric_series(lines: list[MetricsLine], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, for the steps at which it was logged as a number."""
    pairs = [(line["step"], float(line[name])) for line in lines if isinstance(line.get(name), int | float)]
    return [step for step, _ in pairs], [value for _, value in pairs]
