"""The two conversion commands, end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sleuth.arguments import ModelArgs
from sleuth.megatron.convert import hf_to_torch_dist, torch_dist_to_hf
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.megatron
ROOT = Path(__file__).resolve().parents[2]


def run_tool(name: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / name), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_round_trip_through_the_commands(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    there = run_tool("convert_hf_to_torch_dist.py", "--hf-checkpoint", model, "--save", tmp_path / "dist", "--swiglu")
    assert there.returncode == 0, there.stderr
    assert (tmp_path / "dist" / "latest_checkpointed_iteration.txt").read_text() == "0"
    back = run_tool(
        "convert_torch_dist_to_hf.py",
        "--load", tmp_path / "dist", "--hf-checkpoint", model, "--save", tmp_path / "back",
    )  # fmt: skip
    assert back.returncode == 0, back.stderr
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected, found = (
            AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (model, tmp_path / "back")
        )
    assert torch.equal(found, expected)
    text = "<search> who </search>\n\n"
    assert AutoTokenizer.from_pretrained(tmp_path / "back")(text) == AutoTokenizer.from_pretrained(model)(text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_comes_back(tmp_path: Path, dtype: str) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    hf_to_torch_dist(model, tmp_path / "dist", dtype=dtype)
    torch_dist_to_hf(tmp_path / "dist", model, tmp_path / "back", dtype=dtype)
    expected, found = (load_file(path / "model.safetensors") for path in (model, tmp_path / "back"))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].to(getattr(torch, dtype))), name
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == dtype


def test_the_precision_may_change_on_loading(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    hf_to_torch_dist(model, tmp_path / "dist", dtype="bfloat16")
    torch_dist_to_hf(tmp_path / "dist", model, tmp_path / "back", dtype="float32")
    expected, found = (load_file(path / "model.safetensors") for path in (model, tmp_path / "back"))
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name].bfloat16().float()), name


def test_large_models_are_written_in_several_files(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    hf_to_torch_dist(model, tmp_path / "dist")
    torch_dist_to_hf(tmp_path / "dist", model, tmp_path / "back", shard_bytes=100_000)
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 2
    # A folder of several files is a source too.
    hf_to_torch_dist(tmp_path / "back", tmp_path / "again")
    expected, found = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (model, tmp_path / "back"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen2")
    with pytest.raises(ValueError, match=r"config\.json, found none at"):
        hf_to_torch_dist(tmp_path / "missing", tmp_path / "dist")
    with pytest.raises(ValueError, match=r"--num-layers: the flag says 36, the config.json of .* says 2"):
        hf_to_torch_dist(model, tmp_path / "dist", flags=ModelArgs(num_layers=36))
    hf_to_torch_dist(model, tmp_path / "dist")
    with pytest.raises(ValueError, match="holds a checkpoint already"):
        hf_to_torch_dist(model, tmp_path / "dist")
    with pytest.raises(ValueError, match=r"expected a checkpoint in .*iter_0000007"):
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist", "model"]


def test_the_commands_fail_with_one_line(tmp_path: Path) -> None:
    result = run_tool(
        "convert_torch_dist_to_hf.py", "--load", tmp_path, "--hf-checkpoint", tmp_path, "--save", tmp_path / "x"
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: --hf-checkpoint: expected a model's folder")
    assert "Traceback" not in result.stderr
