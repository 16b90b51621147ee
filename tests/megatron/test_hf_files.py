"""Hugging Face folders: which files count, and that nothing in them is passed over in silence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sleuth.arguments import ArgumentsError, read_config
from sleuth.megatron.hf_files import INDEX_FILE, SINGLE_FILE, HfWeights
from sleuth.megatron.model import ModelShape
from sleuth.megatron.weights import checked_weights, hf_names
from tests.tiny_models import make_tiny_model

Tensors = dict[str, Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", "qwen2")


def write(path: Path, tensors: Tensors) -> None:
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def change(folder: Path, by: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    by(tensors)
    write(folder / SINGLE_FILE, tensors)


def configure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def check(folder: Path) -> HfWeights:
    return checked_weights(folder, ModelShape.from_hf(folder))


def refusal(folder: Path) -> str:
    try:
        check(folder)
    except ValueError as error:
        return str(error)
    pytest.fail("was not refused")


def split(folder: Path, places: dict[str, str] | None = None) -> tuple[Tensors, Tensors]:
    """model.safetensors -> a.safetensors and b.safetensors with an index, which `places` adds to."""
    tensors = load_file(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).unlink()
    names = list(tensors)
    halves = [{name: tensors[name] for name in part} for part in (names[:9], names[9:])]
    listed = {}
    for file, half in zip(("a.safetensors", "b.safetensors"), halves, strict=True):
        write(folder / file, half)
        listed |= dict.fromkeys(half, file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": listed | (places or {})}))
    return halves[0], halves[1]


# --- which files count


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_models_own_tensors_are_all_that_is_expected(tmp_path: Path, kind: Any, tied: bool) -> None:
    folder = make_tiny_model(tmp_path / "model", kind, tie_word_embeddings=tied)
    assert hf_names(ModelShape.from_hf(folder)) == sorted(load_file(folder / SINGLE_FILE))
    assert sorted(check(folder).names) == hf_names(ModelShape.from_hf(folder))


def test_stray_files_do_not_count(folder: Path) -> None:
    original = load_file(folder / SINGLE_FILE)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in original.items()}
    write(folder / "old_model.safetensors", zeros)
    source = check(folder)
    assert all(torch.equal(source.read(name), original[name]) for name in source.names)
    split(folder)
    write(folder / "zz.safetensors", zeros)
    source = check(folder)
    assert all(torch.equal(source.read(name), original[name]) for name in original)


def test_a_name_that_two_files_hold_is_an_error(folder: Path) -> None:
    first, second = split(folder)
    twice = next(iter(first))
    write(folder / "b.safetensors", {**second, twice: first[twice]})
    assert re.search(r"a\.safetensors and .*b\.safetensors both hold " + twice, refusal(folder))


def test_an_index_that_names_what_is_not_there(folder: Path) -> None:
    first, _ = split(folder, {"model.extra": "c.safetensors"})
    assert re.search(r"index\.json names c\.safetensors, which is not there; download it", refusal(folder))
    name = next(iter(first))
    index = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    del index["model.extra"]
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": index | {name: "b.safetensors"}}))
    assert f"says that b.safetensors holds {name}, which is not there" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "is empty"),
        ("{", "Expecting"),
        ("{}", "weight_map"),
        ('{"weight_map": {}}', "no tensors"),
        ('{"weight_map": {"a": null}}', "None holds a, expected a file's name"),
        ('{"weight_map": {"a": ""}}', "'' holds a, expected"),
        ('{"weight_map": {"a": "."}}', "'.' holds a, expected"),
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "other/model.safetensors' holds a, expected"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "'/etc/passwd' holds a, expected"),
    ],
)
def test_an_index_that_cannot_be_used(folder: Path, text: str, found: str) -> None:
    (folder / INDEX_FILE).write_text(text)
    assert re.search(f"{INDEX_FILE} .*{found}.*; download it again", refusal(folder))


# --- damaged files


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (lambda whole: b"", "is empty"),
        (lambda whole: whole[:-1], "is cut short or damaged"),
        (lambda whole: whole[:100], "is cut short or damaged"),
        (lambda whole: b"\xff" * 500, "is cut short or damaged"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "pointer of Git LFS"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(
    folder: Path, content: Callable[[bytes], bytes], found: str
) -> None:
    path = folder / SINGLE_FILE
    path.write_bytes(content(path.read_bytes()))
    message = refusal(folder)
    assert message.startswith(f"{path} ")
    assert found in message
    assert "\n" not in message


def test_other_formats_are_told_how_to_become_safetensors(folder: Path) -> None:
    (folder / SINGLE_FILE).rename(folder / "weights.safetensors")
    assert "found weights.safetensors without an index; download the index, or rename" in refusal(folder)
    (folder / "weights.safetensors").rename(folder / "pytorch_model.bin")
    assert re.search(r"found pytorch_model\.bin; write safetensors with `python -c .*save_pretrained", refusal(folder))
    (folder / "pytorch_model.bin").unlink()
    assert "found no weights; download the model again" in refusal(folder)


@pytest.mark.parametrize(("text", "found"), [("", "an empty file"), ("{", "not JSON"), ("[1]", r"'\[1\]'")])
def test_a_config_that_cannot_be_used(folder: Path, text: str, found: str) -> None:
    (folder / "config.json").write_text(text)
    for read in (read_config, ModelShape.from_hf):
        with pytest.raises(ArgumentsError, match=rf"config\.json: expected a JSON object, found {found}.*again"):
            read(folder)


# --- tensors that are not read, or are no weights


def test_fewer_layers_in_the_config_than_in_the_files(folder: Path) -> None:
    configure(folder, num_hidden_layers=1, layer_types=["full_attention"])
    assert re.search(
        r"says 1 layers, the files hold 2: model\.layers\.1\..* and \d+ more would be left", refusal(folder)
    )


def test_more_layers_in_the_config_than_in_the_files(folder: Path) -> None:
    configure(folder, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    assert re.search(r"expected tensor model\.layers\.2\.", refusal(folder))


def test_biases_that_the_model_has_no_place_for(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama")
    bias = "model.layers.0.self_attn.q_proj.bias"
    change(folder, lambda tensors: tensors.update({bias: torch.ones(64)}))
    assert f"{bias} has no place in the model" in refusal(folder)


@pytest.mark.parametrize("name", ["model.layers", "model.layers.", "model.layers.first.weight", "lm_head", ""])
def test_a_tensor_of_a_strange_name(folder: Path, name: str) -> None:
    change(folder, lambda tensors: tensors.update({name: torch.ones(2)}))
    assert f"  {name} has no place in the model" in refusal(folder)


@pytest.mark.parametrize("values", [{"dtype": ["float16"]}, {"quantization_config": "fp8"}, {"vocab_size": None}])
def test_values_that_transformers_stumbles_over(folder: Path, values: dict[str, Any]) -> None:
    configure(folder, **values)
    with pytest.raises(ValueError, match=r"transformers cannot read its config\.json: "):
        ModelShape.from_hf(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
@pytest.mark.parametrize("scales", [False, True])
def test_what_cannot_be_a_weight(folder: Path, dtype: torch.dtype, scales: bool) -> None:
    name = "model.layers.0.mlp.up_proj.weight"

    def quantise(tensors: Tensors) -> None:
        tensors[name] = tensors[name].abs().to(dtype)
        if scales:
            tensors[f"{name}_scale_inv"] = torch.ones(1)

    change(folder, quantise)
    message = refusal(folder)
    assert re.search(rf"expected float32, float16 or bfloat16, found \w+ in {name}; a quantised", message)
    assert (f"{name}_scale_inv has no place" in message) == scales
    with pytest.raises(ValueError, match="cannot be used"):
        HfWeights(folder).read(name)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_tensor_that_is_not_finite_is_named(folder: Path, value: float) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change(folder, lambda tensors: tensors[name][3].fill_(value))
    weights = check(folder)  # whose values are not read yet
    with pytest.raises(ValueError, match=rf"{name} in model.safetensors holds NaN or infinite values; download"):
        weights.read(name)
    weights.read("model.layers.1.mlp.up_proj.weight")


def test_the_output_layer_of_a_tied_model_must_be_the_embedding(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen2", tie_word_embeddings=True, vocab_size=5000)

    def head(change: Callable[[Tensor], Any]) -> Callable[[Tensors], Any]:
        def add(tensors: Tensors) -> None:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            change(tensors["lm_head.weight"])

        return add

    change(folder, head(lambda tensor: None))
    check(folder)
    change(folder, head(lambda tensor: tensor[4500].add_(1)))
    assert "lm_head.weight is model.embed_tokens.weight (tie_word_embeddings), the files hold another" in refusal(
        folder
    )


def test_the_output_layer_of_an_untied_model_must_be_there(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "expected tensor lm_head.weight" in refusal(folder)


def test_known_leftovers_are_harmless(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    change(folder, lambda tensors: tensors.update(extra))
    assert not set(extra) & set(check(folder).names)
