"""The soak test, seconds long: that it runs, and that no request is answered wrongly meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.soak_retrieval import growth

ROOT = Path(__file__).resolve().parents[2]


def test_a_short_soak() -> None:
    flags = ["--seconds", "6", "--clients", "16", "--readings", "12", "--cache_size", "50", "--tolerance_mb", "60"]
    command = [sys.executable, "-m", "benchmarks.soak_retrieval", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["requests"] > 50
    assert "hung up" in done.stdout


def test_growth_is_that_of_the_medians() -> None:
    assert growth([1, 5, 10, 10, 90, 10, 10, 10, 12, 99, 12, 12][:8]) == 0
    assert growth([1, 1, 1, 10, 10, 10, 15, 15, 15, 20, 20, 99]) == 10
