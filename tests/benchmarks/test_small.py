"""The benchmarks run as their docstrings say, here with the smallest sizes: what they print, not how fast it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hook_overhead", "--trajectories 40 --concurrency 8 --trials 1 --group 1"),
        ("reward", "--trajectories 100 --trials 1"),
    ],
)
def test_the_last_line_is_the_result(name: str, options: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", *options.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["name"] == name
    assert result["ratio"] > 0
    assert {"ours", "reference"} <= set(result)
