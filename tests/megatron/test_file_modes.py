"""What a run leaves can be read by whom the umask lets read it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sleuth.arguments import parse_args
from sleuth.cluster.logs import configure_logging
from sleuth.megatron.convert import hf_to_torch_dist, torch_dist_to_hf
from sleuth.metrics.destinations import CLASSES
from sleuth.metrics.tracker import Tracker
from tests.megatron.harness import save_tiny_model

pytestmark = pytest.mark.megatron


@pytest.fixture(params=[(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)], ids=["022", "027"])
def modes(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Modes of files and of folders under a umask."""
    umask, files, folders = request.param
    before = os.umask(umask)
    yield files, folders
    os.umask(before)


def assert_modes(folder: Path, modes: tuple[int, int]) -> None:
    for path in [folder, *folder.rglob("*")]:
        assert path.stat().st_mode & 0o777 == modes[path.is_dir()], path


def test_checkpoints_and_exported_models(tmp_path: Path, modes: tuple[int, int]) -> None:
    model = save_tiny_model(tmp_path / "model", "qwen2")
    (model / "tokenizer.json").touch(0o600)  # a source for its owner only
    hf_to_torch_dist(model, tmp_path / "dist")
    torch_dist_to_hf(tmp_path / "dist", model, tmp_path / "back")
    for name in ("dist", "back"):
        assert_modes(tmp_path / name, modes)


def test_configuration_metrics_and_logs(tmp_path: Path, modes: tuple[int, int]) -> None:
    run = tmp_path / "run"
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    try:
        configure_logging(run, "driver")
    finally:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logging.captureWarnings(False)
    flags = (
        "--hf-checkpoint m --prompt-data p --colocate --num-rollout 2 --rollout-batch-size 1 --n-samples-per-prompt 4"
    )
    args = parse_args([*flags.split(), "--global-batch-size", "4", "--custom-rm-path", "a.b"])
    args.write(run / "config.yaml")
    settings: Any = SimpleNamespace(num_rollout=2, **dict.fromkeys((f"use_{name}" for name in CLASSES), False))
    with Tracker(settings, run) as tracker:
        tracker.log(1, {"train/loss": 0.5})
    assert {path.name for path in run.rglob("*") if path.is_file()} == {"driver.log", "config.yaml", "metrics.jsonl"}
    assert_modes(run, modes)
