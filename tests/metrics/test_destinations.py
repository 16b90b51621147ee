"""The real packages of the trackers, offline. A package that is not installed is skipped: they are no requirement."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
from pathlib import Path

import pytest

from sleuth.metrics.tracker import Tracker
from tests.metrics.test_tracker import TrackerSettings

STEPS = {1: 0.5, 2: 0.25}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "SWANLAB_MODE": "offline"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def track(run_dir: Path, **settings: bool) -> None:
    with Tracker(TrackerSettings(**settings), run_dir) as tracker:  # type: ignore[arg-type]
        for step, loss in STEPS.items():
            tracker.log(step, {"train/loss": loss})


def needs(package: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"{package} is not installed (pip install {package})")


@needs("wandb")
def test_wandb_offline(offline: Path, caplog: pytest.LogCaptureFixture) -> None:
    track(offline, use_wandb=True)
    assert "gets no more metrics" not in caplog.text
    (file,) = offline.glob("wandb/offline-run-*/run-*.wandb")
    assert b"train/loss" in file.read_bytes()
    assert (offline / "wandb_id.txt").read_text().strip() in file.name


@needs("swanlab")
def test_swanlab_offline(offline: Path, caplog: pytest.LogCaptureFixture) -> None:
    track(offline, use_swanlab=True)
    assert "gets no more metrics" not in caplog.text
    files = [path for path in (offline / "swanlab").rglob("*") if path.is_file()]
    assert any(b"train/loss" in path.read_bytes() for path in files)


@needs("trackio")
def test_trackio_on_this_machine(offline: Path, caplog: pytest.LogCaptureFixture) -> None:
    track(offline, use_trackio=True)
    assert "gets no more metrics" not in caplog.text
    found = {}
    for path in (offline.parent / "trackio").rglob("*.db"):
        with sqlite3.connect(path) as database:
            for step, metrics in database.execute("select step, metrics from metrics"):
                found[step] = json.loads(metrics)["train/loss"]
    assert found == STEPS
