"""The weights that an evaluation without training serves: those of the model's folder, or of a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from sleuth.arguments import Args, parse_args
from sleuth.cluster.exported import weights_to_evaluate

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "data/demo/model"


def make_args(*flags: str) -> Args:
    base = "--custom-rm-path a.b --colocate --eval-only --eval-prompt-data t t.jsonl --hf-checkpoint"
    return parse_args([*base.split(), str(MODEL), *flags])


def test_without_a_checkpoint_they_are_the_models_own(tmp_path: Path) -> None:
    with weights_to_evaluate(make_args(), tmp_path) as (args, step):
        assert (args.hf_checkpoint, step) == (str(MODEL), 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.megatron
def test_a_checkpoint_is_converted_and_its_copy_goes_at_the_end(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "tools/convert_hf_to_torch_dist.py",
        "--hf-checkpoint",
        MODEL,
        "--save",
        tmp_path / "ref",
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    args: Any = make_args("--load", str(tmp_path / "ref"))
    with weights_to_evaluate(args, tmp_path / "run") as (evaluated, step):
        folder = Path(evaluated.hf_checkpoint)
        assert step == 0
        found, expected = (load_file(path / "model.safetensors") for path in (folder, MODEL))
        assert found.keys() == expected.keys()
        assert all((found[name].float() == expected[name].float()).all() for name in expected)
        assert (folder / "tokenizer.json").is_file()
    assert not folder.exists()


@pytest.mark.megatron
def test_a_checkpoint_that_is_not_there_is_told(tmp_path: Path) -> None:
    args: Any = SimpleNamespace(load=tmp_path / "none", hf_checkpoint=str(MODEL), dtype="float32", verify=True)
    with pytest.raises(ValueError, match="none"), weights_to_evaluate(args, tmp_path):
        pass
