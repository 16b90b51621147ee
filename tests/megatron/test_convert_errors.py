"""Conversions that cannot be right: bad models and places, damaged checkpoints, and the check of logits afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sleuth.megatron  # noqa: F401  (before megatron)
from sleuth.arguments import ModelArgs
from sleuth.checkpoints import find_checkpoint
from sleuth.megatron import convert, probe, weights
from sleuth.megatron.convert import hf_to_torch_dist, torch_dist_to_hf
from sleuth.megatron.model import ModelShape
from tests.tiny_models import make_tiny_model
from tools import convert_hf_to_torch_dist as to_torch_dist
from tools import convert_torch_dist_to_hf as to_hf

pytestmark = pytest.mark.megatron


# --- the check after a conversion


def test_a_conversion_that_went_wrong_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    hf_to_torch_dist(model, tmp_path / "right")
    merge = weights._merge_qkv
    monkeypatch.setattr(weights, "_merge_qkv", lambda whole, groups: merge([whole[0], whole[2], whole[1]], groups))
    with pytest.raises(ValueError, match=r"a logit differs by \S+, expected at most \S+ \(0\.001 of the largest"):
        hf_to_torch_dist(model, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()
    hf_to_torch_dist(model, tmp_path / "dist", check=False)
    monkeypatch.setattr(weights, "_merge_qkv", merge)
    split = weights._split_qkv
    monkeypatch.setattr(weights, "_split_qkv", lambda merged, shape: [split(merged, shape)[i] for i in (0, 2, 1)])
    with pytest.raises(ValueError, match="a logit differs"):
        torch_dist_to_hf(tmp_path / "right", model, tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist", "model", "right"]


def test_a_kill_during_the_check_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    killed = tmp_path / "killed"
    with monkeypatch.context() as patch:
        # What the disk holds while logits are compared is what a kill leaves at that moment.
        patch.setattr(convert, "_check_equal", lambda *_: shutil.copytree(tmp_path / "dist", killed))
        hf_to_torch_dist(model, tmp_path / "dist")
    assert find_checkpoint(killed) is None
    assert hf_to_torch_dist(model, killed) == find_checkpoint(killed)
    assert sorted(path.name for path in killed.iterdir()) == ["iter_0000000", "latest_checkpointed_iteration.txt"]


def test_a_weight_that_is_refused_is_no_trouble_of_the_disk(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight in model\.safetensors holds NaN") as caught:
        hf_to_torch_dist(model, tmp_path / "dist")
    assert "are free there" not in str(caught.value)
    assert not (tmp_path / "dist").exists()


def test_a_place_that_cannot_be_written_to_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    (tmp_path / "file").touch()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for place in ("file", "file/below"):
        with pytest.raises(ValueError, match=r"--save: expected a folder that can be written, found .*/file; choose"):
            hf_to_torch_dist(model, tmp_path / place)
        with pytest.raises(ValueError, match=r"--save: expected a folder that can be written, found .*/file; choose"):
            torch_dist_to_hf(tmp_path / "dist", model, tmp_path / place)
    with pytest.raises(ValueError, match="is the folder of --hf-checkpoint"):
        hf_to_torch_dist(model, tmp_path / "here" / ".." / "model")
    with pytest.raises(ValueError, match="is the folder that this was started in"):
        torch_dist_to_hf(tmp_path / "dist", model, Path())


def test_what_does_not_fit_into_memory_is_not_checked_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10**6))
    hf_to_torch_dist(model, tmp_path / "dist")
    assert "not checked: 0.0 billion parameters in float32 do not fit" in caplog.text


def test_not_a_number_is_a_difference() -> None:
    with pytest.raises(ValueError, match="differs by nan"):
        probe.compare(torch.tensor([[float("nan")]]), torch.ones(1, 1))


# --- bad input


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    with pytest.raises(ValueError, match=r"config\.json, found none at"):
        hf_to_torch_dist(tmp_path / "missing", tmp_path / "dist")
    with pytest.raises(ValueError, match=r"--num-layers: the flag says 36, the config.json of .* says 2"):
        hf_to_torch_dist(model, tmp_path / "dist", flags=ModelArgs(num_layers=36))
    hf_to_torch_dist(model, tmp_path / "dist")
    with pytest.raises(ValueError, match="holds a checkpoint already"):
        hf_to_torch_dist(model, tmp_path / "dist")
    with pytest.raises(ValueError, match=r"expected the checkpoint .*iter_0000007"):
        torch_dist_to_hf(tmp_path / "dist", model, tmp_path / "back", iteration=7)
    with pytest.raises(ValueError, match="is not empty"):
        torch_dist_to_hf(tmp_path / "dist", model, model)
    with pytest.raises(ValueError, match=r"found no latest_checkpointed_iteration"):
        torch_dist_to_hf(tmp_path, model, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    hf_to_torch_dist(model, tmp_path / "dist")
    other = make_tiny_model(tmp_path / "other", "qwen2", vocab_size=640)
    with pytest.raises(
        ValueError, match=r"embedding.word_embeddings.weight .* has shape \[512, 64\], expected \[640, 64\]"
    ):
        torch_dist_to_hf(tmp_path / "dist", other, tmp_path / "back")

    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][:500].clone()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head.weight \[500, 64\] does not fit"):
        hf_to_torch_dist(model, tmp_path / "again")
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"expected tensor model.norm.weight"):
        hf_to_torch_dist(model, tmp_path / "again")


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    hf_to_torch_dist(model, tmp_path / "dist")
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="GB free"):
        torch_dist_to_hf(tmp_path / "dist", model, tmp_path / "back")
    with pytest.raises(OSError, match="GB free") as caught:
        hf_to_torch_dist(model, tmp_path / "again")
    assert caught.value.__cause__ is not caught.value
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist", "model"]


def damage(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


BAD_MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut short": (lambda model: damage(model / "model.safetensors", 5000), "model.safetensors is cut short or damaged"),
    "empty": (lambda model: damage(model / "model.safetensors", 0), "model.safetensors is empty; download it again"),
    "pickles": (
        lambda model: (model / "model.safetensors").rename(model / "pytorch_model.bin"),
        "pytorch_model.bin; write safetensors with `python -c",
    ),
    "empty config": (lambda model: damage(model / "config.json", 0), "config.json: expected a JSON object, found an"),
    "half a config": (
        lambda model: damage(model / "config.json", 90),
        "config.json: expected a JSON object, found no",
    ),
    "no config": (lambda model: (model / "config.json").unlink(), "expected a model's folder with config.json"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_a_bad_model_is_one_line(tmp_path: Path, name: str) -> None:
    spoil, message = BAD_MODELS[name]
    model = make_tiny_model(tmp_path / "model", "qwen2")
    spoil(model)
    for tool, words in ((to_torch_dist, []), (to_hf, ["--load", str(tmp_path / "dist")])):
        if tool is to_hf and "config" not in name:
            continue  # it reads no weights of the model
        with pytest.raises(SystemExit) as caught:
            tool.main(["--hf-checkpoint", str(model), "--save", str(tmp_path / "new"), *words])
        assert str(caught.value.code).startswith("error: ")
        assert message in str(caught.value.code)
        assert "\n" not in str(caught.value.code)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("pattern", [".metadata", "*.distcp", "metadata.json", "common.pt"])
@pytest.mark.parametrize("keep", [None, 0, 100])
def test_a_damaged_checkpoint_is_an_error(tmp_path: Path, pattern: str, keep: int | None) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    found = hf_to_torch_dist(model, tmp_path / "dist", check=False)
    (path,) = found.glob(pattern)
    path.unlink() if keep is None else damage(path, keep)
    with pytest.raises(SystemExit) as caught:
        to_hf.main(["--load", str(found.parent), "--hf-checkpoint", str(model), "--save", str(tmp_path / "new")])
    assert str(caught.value.code).startswith("error: ")
    assert str(found) in str(caught.value.code)
    assert not (tmp_path / "new").exists()


def test_a_reference_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    other = make_tiny_model(tmp_path / "other", "qwen2", num_hidden_layers=3, rms_norm_eps=1e-5)
    map_of_model = SimpleNamespace(shape=ModelShape.from_hf(model))
    with pytest.raises(ValueError, match=r"num_layers is 3, expected 2, norm_epsilon is 1e-05, expected 1e-06"):
        weights.load_hf_weights(map_of_model, other)  # type: ignore[arg-type]
