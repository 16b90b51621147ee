"""Between Hugging Face folders and torch_dist checkpoints, in one process without a GPU or an engine.

`tools/convert_hf_to_torch_dist.py` and `tools/convert_torch_dist_to_hf.py` are the commands.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from sleuth.arguments import ModelArgs, check_model_flags, read_config
from sleuth.checkpoints import TRACKER
from sleuth.megatron import parallel
from sleuth.megatron.checkpoint import Checkpoints, load_weights
from sleuth.megatron.model import ModelShape, PolicyModel, build_model, plain_config, resolve_dtype
from sleuth.megatron.weights import HfWeights, WeightMap
from sleuth.paths import follow_umask

SHARD_BYTES = 5 * 10**9
"""Largest size of one safetensors file."""

_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")

Progress = Callable[[str, int], None]
"""Called with the name of each tensor when it is done, and how many there are."""


def hf_to_torch_dist(
    hf_checkpoint: Path,
    save: Path,
    *,
    dtype: str = "auto",
    flags: ModelArgs | None = None,
    progress: Progress = lambda name, total: None,
) -> Path:
    """Write the weights of a Hugging Face folder as a torch_dist checkpoint under `save`; returns its folder.

    `dtype` auto keeps that of config.json. Raises ValueError if the source is not a model, contradicts `flags`
    or its own weights, or `save` holds a checkpoint already; OSError if the disk is too small.
    """
    config = read_config(hf_checkpoint)
    if flags is not None:
        check_model_flags(flags, hf_checkpoint)
    if (save / TRACKER).exists():
        raise ValueError(f"--save {save} holds a checkpoint already; remove it or choose another folder")
    source = HfWeights(hf_checkpoint)
    dtype = stored_dtype(config) if dtype == "auto" else dtype

    def read(name: str) -> Tensor:
        tensor = source.read(name)
        progress(name, len(source.names))
        return tensor

    shape = ModelShape.from_hf(hf_checkpoint)
    with parallel.alone():
        model = _build(shape, dtype)
        WeightMap(model, shape).load(read)
        return Checkpoints(model, None).save(save, 0, {})


def torch_dist_to_hf(
    load: Path,
    hf_checkpoint: Path,
    save: Path,
    *,
    iteration: int | None = None,
    dtype: str = "auto",
    progress: Progress = lambda name, total: None,
) -> Path:
    """Write a torch_dist checkpoint as a Hugging Face folder; config and tokenizer come from `hf_checkpoint`.

    `iteration` [the newest] is the step; `dtype` auto keeps that of config.json. Returns the checkpoint read. Raises
    ValueError if it is not there or does not fit config.json, or `save` is not empty; OSError if the disk is too small.
    """
    config = read_config(hf_checkpoint)
    if save.exists() and any(save.iterdir()):
        raise ValueError(f"--save {save} is not empty; remove it or choose another folder")
    dtype = stored_dtype(config) if dtype == "auto" else dtype
    shape = ModelShape.from_hf(hf_checkpoint)
    with parallel.alone():
        model = _build(shape, dtype)
        found = load_weights(model, load, iteration)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in WeightMap(model, shape).tensors()}
    write_hf_folder(tensors, hf_checkpoint, save, dtype, progress)
    return found


def write_hf_folder(
    tensors: Mapping[str, Tensor],
    hf_checkpoint: Path,
    save: Path,
    dtype: str,
    progress: Progress = lambda name, total: None,
    *,
    replace: bool = False,
) -> None:
    """Write tensors of `dtype` as a Hugging Face folder, with config and tokenizer of `hf_checkpoint`.

    It is there whole or not at all; only with `replace` may `save` hold something, which goes. OSError if it does, or
    if the disk is too small.
    """
    unfinished = save.with_name(f".unfinished-{save.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        _check_space(unfinished, sum(tensor.nbytes for tensor in tensors.values()))
        _copy_model_files(hf_checkpoint, unfinished, dtype)
        _write_safetensors(tensors, unfinished, progress)
        follow_umask(unfinished)
        if save.exists():
            shutil.rmtree(save) if replace else save.rmdir()
        unfinished.rename(save)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def stored_dtype(config: Mapping[str, Any]) -> str:
    """The dtype that config.json names: float32 or bfloat16. ValueError for others."""
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"config.json names the dtype {name!r}, which is not kept; give --dtype bfloat16 or float32")
    return str(name)


def _build(shape: ModelShape, dtype: str) -> list[PolicyModel]:
    return build_model(shape, plain_config(shape, resolve_dtype(dtype)))


def _copy_model_files(source: Path, target: Path, dtype: str) -> None:
    """Everything but weights: config (with the dtype as written), tokenizer, generation settings, licence."""
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(path, target / path.name)
    config = read_config(target)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_safetensors(tensors: Mapping[str, Tensor], folder: Path, progress: Progress) -> None:
    """One file, or several with the index that transformers reads."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
        for name in shard:
            progress(name, len(tensors))
    if len(shards) > 1:
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: the model needs {needed / 1e9:.3f} GB, {folder.parent} has "
            f"{free / 1e9:.3f} GB free",
        )
