"""The benchmarks run as their docstrings say, here with the smallest sizes: what they print, not how fast it is."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.options import positive, whole_number

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "options")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hook_overhead", "--trajectories 40 --concurrency 8 --trials 1 --group 1"),
        ("reward", "--trajectories 100 --trials 1"),
        ("page_reading", "--pages 4 --hard 1"),
        ("matrix_products", "--rows 1"),
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


class _ParsedError(Exception):
    """The options were accepted, and the benchmark would begin."""


def numeric_options(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options of a benchmark whose value is a number: those with a type other than Path."""
    found: list[str] = []

    def record(parser: argparse.ArgumentParser, *_: object) -> argparse.Namespace:
        actions = [action for action in parser._actions if action.type not in (None, Path)]
        found.extend(action.option_strings[0] for action in actions)
        raise _ParsedError

    main = importlib.import_module(f"benchmarks.{name}").main
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", record)
        with pytest.raises(_ParsedError):
            main()
    return found


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("value", ["0", "-1", "x", "nan"])
def test_sizes_that_cannot_be_measured_are_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every numeric option, each with exit status 2 and one line that names it and what it takes."""
    options = numeric_options(name, monkeypatch)
    assert options or name in ("retrieval_servers", "faults")
    for option in options:
        monkeypatch.setattr(sys, "argv", [name, f"{option}={value}"])
        with pytest.raises(SystemExit) as stopped:
            importlib.import_module(f"benchmarks.{name}").main()
        told = capsys.readouterr().err.splitlines()[-1]
        assert stopped.value.code == 2
        assert f"argument {option}: expected a " in told
        assert told.endswith(f"found {value!r}")


def test_a_benchmark_refuses_without_a_traceback() -> None:
    command = [sys.executable, "-m", "benchmarks.packing", "--trials", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith("--trials: expected a whole number of 1 or more, found '0'")


def test_options_that_go_together(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["mis", "--shortest", "9", "--longest", "8"])
    with pytest.raises(SystemExit):
        importlib.import_module("benchmarks.mis").main()
    assert capsys.readouterr().err.splitlines()[-1].endswith("--longest 8 is less than --shortest 9")


def test_types_of_options() -> None:
    assert whole_number()("3") == 3
    assert whole_number(4, multiple=8)("16") == 16
    assert positive(1)("1") == 1.0
    for parse, text in (
        (whole_number(4), "3"),
        (whole_number(multiple=8), "12"),
        (positive(1), "1.5"),
        (positive(), "inf"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=f"found '{text}'"):
            parse(text)
