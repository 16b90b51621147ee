"""What a finished run's folder tells, besides its metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def read_configuration(run_dir: Path) -> dict[str, Any]:
    """The resolved configuration that the run saved as `config.yaml`; empty if it did not."""
    path = run_dir / "config.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
