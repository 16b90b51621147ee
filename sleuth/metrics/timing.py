"""Measures the seconds that the parts of a step take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Set `metrics["time/<name>"]` to the seconds that the block took."""
    start = time.perf_counter()
    try:
        yield
    finally:
        metrics[f"time/{name}"] = time.perf_counter() - start
