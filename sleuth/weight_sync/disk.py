"""Sends weights through a folder that trainer and engines can read: slower than tensors, but works across machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sleuth.weight_sync.control import PauseMode, paused_engines


def load_weights_from_disk(
    urls: Sequence[str], model_path: str | Path, version: str, *, mode: PauseMode = "abort", timeout: float = 600.0
) -> None:
    """Have every engine at `urls` load the Hugging Face model in `model_path` as weights `version`.

    The folder must be complete, and the engines must see it under that path. Raises ValueError if it has no
    configuration, and WeightSyncError if an engine fails; its message says whether the engines are left paused.
    """
    path = Path(model_path).resolve()
    if not (path / "config.json").is_file():
        raise ValueError(f"expected a Hugging Face model in {path}, found no config.json there: export one first")
    body = {"model_path": str(path), "weight_version": version, "flush_cache": False}
    with paused_engines(urls, mode=mode, timeout=timeout) as engines:
        engines.change_weights("update_weights_from_disk", body)
