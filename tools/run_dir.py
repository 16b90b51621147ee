"""What the tools read of a finished run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sleuth.metrics.jsonl import MetricsLine


def read_configuration(run_dir: Path) -> dict[str, Any]:
    """The resolved configuration that the run saved as `config.yaml`; empty if it did not."""
    path = run_dir / "config.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}


def metric_series(lines: list[MetricsLine], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was logged and is a number."""
    pairs = [(line["step"], float(line[name])) for line in lines if isinstance(line.get(name), int | float)]
    return [step for step, _ in pairs], [value for _, value in pairs]
