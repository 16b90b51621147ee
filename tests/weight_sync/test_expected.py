"""What a trainer would send is compared with the files of a model, by name and shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sleuth.weight_sync.expected import differences

HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
OURS = {EMBEDDING: [4, 2], NORM: [2]}


def folder_with(path: Path, **shapes: list[int]) -> Path:
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path / "model.safetensors")
    return path


def test_the_same_weights_differ_in_nothing(tmp_path: Path) -> None:
    assert differences(OURS, folder_with(tmp_path, **OURS)) == []


def test_what_every_reader_computes_and_the_embedding_again_are_no_weights(tmp_path: Path) -> None:
    more = OURS | {HEAD: [4, 2], "model.layers.0.self_attn.rotary_emb.inv_freq": [1]}
    assert differences(OURS, folder_with(tmp_path, **more)) == []


def test_every_other_difference_is_named(tmp_path: Path) -> None:
    theirs = {EMBEDDING: [4, 3], HEAD: [5, 3]}
    assert differences(OURS, folder_with(tmp_path, **theirs)) == [
        f"would not be sent: {HEAD}",
        f"has no place there: {NORM}",
        f"of another shape: {EMBEDDING} is [4, 2], expected [4, 3]",
    ]


def test_files_that_the_index_does_not_list_are_not_the_models(tmp_path: Path) -> None:
    folder_with(tmp_path, **OURS)
    save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": dict.fromkeys(OURS, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert differences(OURS, tmp_path) == []


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected safetensors files in"):
        differences(OURS, tmp_path)
