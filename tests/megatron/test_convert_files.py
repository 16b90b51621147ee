"""What a conversion leaves on the disk, whole or not at all, and how much memory it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import sleuth.megatron  # noqa: F401  (before megatron)
from sleuth.megatron.convert import hf_to_torch_dist, torch_dist_to_hf, write_hf_folder
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.megatron
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path, umask: int, mode: int) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    before = os.umask(umask)
    try:
        write_hf_folder({"a": torch.ones(3)}.items(), model, tmp_path / "new", "float32")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {mode}


def test_weights_that_are_not_finite_are_named_and_not_written(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    tensors = {"a": torch.ones(3), "b": torch.tensor([1.0, float("nan")])}
    with pytest.raises(ValueError, match="found NaN or infinite values in b"):
        write_hf_folder(tensors.items(), model, tmp_path / "new", "float32")
    assert not (tmp_path / "new").exists()


def test_an_export_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    model, save = make_tiny_model(tmp_path / "model", "qwen2"), tmp_path / "new"

    def write(value: float, *, fail: bool = False, **options: Any) -> None:
        def tensors() -> Iterator[tuple[str, Tensor]]:
            for index in range(4):
                yield f"t{index}", torch.full((3,), value)
            if fail:
                raise ValueError("no more")

        write_hf_folder(tensors(), model, save, "float32", shard_bytes=12, **options)

    def held() -> float:
        return float(load_file(save / "model-00004-of-00004.safetensors")["t3"][0])

    with pytest.raises(ValueError, match="no more"):
        write(1.0, fail=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    write(1.0)
    with pytest.raises(OSError, match="not empty"):
        write(2.0)
    with pytest.raises(ValueError, match="no more"):
        write(2.0, replace=True, fail=True)
    assert held() == 1.0
    child = os.fork()
    if child == 0:  # a kill in the middle
        write(3.0, replace=True, verify=lambda folder: os._exit(9))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert held() == 1.0
    write(4.0, replace=True)
    assert held() == 4.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "new"]


MEASURE = """
import sys, threading, time
from pathlib import Path
from sleuth.megatron import streaming
from sleuth.megatron.convert import hf_to_torch_dist, torch_dist_to_hf

streaming.PIECE_BYTES = 30_000_000

def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)

root = Path(sys.argv[1])
before = anonymous()
peak = [before]
threading.Thread(target=watch, daemon=True).start()
hf_to_torch_dist(root / "model", root / "dist", check=False)
there = peak[0] - before
torch_dist_to_hf(root / "dist", root / "model", root / "back", check=False, shard_bytes=20_000_000)
print(there, peak[0] - before)
"""


def test_no_more_than_a_piece_is_in_memory(tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "vocab_size": 4096}
    model = make_tiny_model(tmp_path / "model", "llama", **wide)
    size = (model / "model.safetensors").stat().st_size
    assert size > 250e6
    result = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    there, back = map(int, result.stdout.split())
    assert there < 0.25 * size  # a tensor
    assert back < 0.6 * size  # what is read at once, and a file


def test_large_models_are_written_in_several_files(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    hf_to_torch_dist(model, tmp_path / "dist")
    torch_dist_to_hf(tmp_path / "dist", model, tmp_path / "back", shard_bytes=100_000)
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 2
    # A folder of several files is a source too.
    hf_to_torch_dist(tmp_path / "back", tmp_path / "again")
    expected, found = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (model, tmp_path / "back"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    (tmp_path / "disk" / "empty").mkdir(parents=True)
    for place in ("empty", "absent"):
        (tmp_path / place).symlink_to(tmp_path / "disk" / place)
        write_hf_folder({"a": torch.ones(3)}.items(), model, tmp_path / place, "float32")
        assert (tmp_path / place).is_symlink()
        assert (tmp_path / "disk" / place / "model.safetensors").is_file()
