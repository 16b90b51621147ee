"""Converts Hugging Face folders to torch_dist checkpoints and back, in one process without a GPU or an engine.

`tools/convert_hf_to_torch_dist.py` and `tools/convert_torch_dist_to_hf.py` are the commands.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from sleuth.arguments import ModelArgs, check_model_flags, read_config
from sleuth.checkpoints import TRACKER, checkpoint_folder, publish, tidy, unfinished_folder
from sleuth.megatron import parallel, probe
from sleuth.megatron.checkpoint import Checkpoints, existing_checkpoint
from sleuth.megatron.finite import not_finite
from sleuth.megatron.hf_files import INDEX_FILE, SINGLE_FILE
from sleuth.megatron.model import ModelShape, PolicyModel, build_model, plain_config, resolve_dtype
from sleuth.megatron.streaming import StreamedLoad, StreamedSave
from sleuth.megatron.verify import check_checkpoint
from sleuth.megatron.weights import WeightMap, checked_weights, hf_names
from sleuth.paths import check_writable, follow_umask

logger = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9
"""Largest size of one safetensors file."""

_M_MMAP_THRESHOLD = -3  # malloc.h
_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")

Progress = Callable[[str, int], None]
"""Called with the name of each tensor when it is done, and how many there are."""


def hf_to_torch_dist(
    hf_checkpoint: Path,
    save: Path,
    *,
    dtype: str = "auto",
    flags: ModelArgs | None = None,
    check: bool = True,
    progress: Progress = lambda name, total: None,
) -> Path:
    """Write the weights of a Hugging Face folder as a torch_dist checkpoint under `save`; returns its folder.

    `dtype` auto keeps that of config.json. `check` verifies, if memory allows, that both compute the same logits.
    Raises ValueError if the source is not a model, contradicts `flags` or its own weights, or if `save` already holds
    a checkpoint; OSError if the disk is too small.
    """
    config = read_config(hf_checkpoint)
    if flags is not None:
        check_model_flags(flags, hf_checkpoint)
    check_writable(save, "--save")
    if save.resolve() == hf_checkpoint.resolve():
        raise ValueError(f"--save {save} is the folder of --hf-checkpoint; choose another folder")
    if (save / TRACKER).exists():
        raise ValueError(f"--save {save} holds a checkpoint already; remove it or choose another folder")
    shape = ModelShape.from_hf(hf_checkpoint)
    source = checked_weights(hf_checkpoint, shape)
    dtype = stored_dtype(config) if dtype == "auto" else dtype

    refused: list[ValueError] = []

    def read(name: str) -> Tensor:
        progress(name, len(hf_names(shape)))
        try:
            return source.read(name)
        except ValueError as error:
            refused.append(error)
            raise

    with _alone():
        model = _described(shape, dtype)
        weights = WeightMap(model, shape)
        weights.check(source.describe)
        staging = unfinished_folder(save, 0)  # until it is checked, nobody may take it for a checkpoint
        tidy(save)
        try:
            made = Checkpoints(model, None, StreamedSave(model, weights.values(read))).save(staging, 0, {})
            if check:
                _check_equal(model, hf_checkpoint, made)
            publish(made, save, 0)
        except OSError:
            if refused:  # a save takes every error for one of the disk
                raise refused[0] from None
            raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            _remove_if_empty(save)
        return checkpoint_folder(save, 0)


def torch_dist_to_hf(
    load: Path,
    hf_checkpoint: Path,
    save: Path,
    *,
    iteration: int | None = None,
    dtype: str = "auto",
    check: bool = True,
    verify: bool = True,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda name, total: None,
) -> Path:
    """Write a torch_dist checkpoint as a Hugging Face folder; config and tokenizer come from `hf_checkpoint`.

    `iteration` [the newest] is the step; `dtype` auto keeps that of config.json. No file is larger than `shard_bytes`,
    unless a single tensor is. `check` verifies, if memory allows, that both compute the same logits, `verify` before
    that the checkpoint's files against their checksums. Returns the checkpoint that was read. Raises ValueError if
    there is none, it is damaged or does not fit config.json, or `save` is not empty; OSError if the disk is too small.
    """
    config = read_config(hf_checkpoint)
    check_writable(save, "--save")
    if save.exists() and any(save.iterdir()):
        raise ValueError(f"--save {save} is not empty; remove it or choose another folder")
    if save.resolve() == Path.cwd():
        raise ValueError(f"--save {save} is the folder that this was started in, which is replaced; choose a new one")
    dtype = stored_dtype(config) if dtype == "auto" else dtype
    shape = ModelShape.from_hf(hf_checkpoint)
    with _alone():
        found = existing_checkpoint(load, iteration)
        check_checkpoint(found, verify=verify)
        model = _described(shape, dtype)
        tensors = WeightMap(model, shape).stage_tensors(StreamedLoad(model, found))
        write_hf_folder(
            tensors,
            hf_checkpoint,
            save,
            dtype,
            lambda name: progress(name, len(hf_names(shape))),
            needed_bytes=sum(parameter.nbytes for chunk in model for parameter in chunk.parameters()),
            shard_bytes=shard_bytes,
            verify=lambda folder: _check_equal(model, folder, found) if check else None,
        )
    return found


def write_hf_folder(
    tensors: Iterable[tuple[str, Tensor]],
    hf_checkpoint: Path,
    save: Path,
    dtype: str,
    progress: Callable[[str], None] = lambda name: None,
    *,
    replace: bool = False,
    needed_bytes: int = 0,
    shard_bytes: int = SHARD_BYTES,
    verify: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write tensors of `dtype` as a Hugging Face folder, with config and tokenizer of `hf_checkpoint`.

    The folder appears whole or not at all, and only if `verify`, called with it before it takes its place, raises
    nothing. At most `shard_bytes` of tensors are held at once. With `replace` the content of `save` is replaced;
    without it, OSError if `save` holds anything. OSError also if the disk is too small.
    """
    save = save.resolve()  # what a link points to is replaced, not the link
    unfinished = save.with_name(f".unfinished-{save.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        _check_space(unfinished, needed_bytes)
        _copy_model_files(hf_checkpoint, unfinished, dtype)
        _write_safetensors(tensors, unfinished, shard_bytes, progress)
        follow_umask(unfinished)
        verify(unfinished)
        _put_in_place(unfinished, save, replace)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _put_in_place(unfinished: Path, save: Path, replace: bool) -> None:
    """Rename `unfinished` to `save`, so that a kill leaves the old folder, the new one, or none; never part of one."""
    replaced = save.with_name(f".replaced-{save.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if save.exists() and not replace:
        save.rmdir()
    elif save.exists():
        save.rename(replaced)
    try:
        unfinished.rename(save)
    except OSError:
        if replaced.exists():
            replaced.rename(save)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def stored_dtype(config: Mapping[str, Any]) -> str:
    """The dtype that config.json names: float32 or bfloat16. ValueError for others."""
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"config.json names the dtype {name!r}, which is not kept; give --dtype bfloat16 or float32")
    return str(name)


@contextmanager
def _alone() -> Iterator[None]:
    """Inside the block, this process has a process group of its own, and frees the memory of tensors at once."""
    _return_freed_memory()
    with parallel.alone():
        yield


def _return_freed_memory() -> None:
    """Make glibc return the memory of freed tensors to the system; by default it keeps blocks of up to 32 MB."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def _build(shape: ModelShape, dtype: str) -> list[PolicyModel]:
    return build_model(shape, plain_config(shape, resolve_dtype(dtype)))


def _described(shape: ModelShape, dtype: str) -> list[PolicyModel]:
    """The model on the meta device. Until it is moved there, its memory is reserved, but never used."""
    return [chunk.to("meta") for chunk in _build(shape, dtype)]


def _check_equal(model: list[PolicyModel], hf_folder: Path, found: Path) -> None:
    """Raise ValueError if the logits of transformers (with the folder) and the trainer (with the checkpoint) differ."""
    (chunk,) = model
    size = sum(parameter.numel() for parameter in chunk.parameters())
    if not probe.fits_in_memory(size):
        logger.warning("not checked: %.1f billion parameters in float32 do not fit into this memory", size / 1e9)
        return
    expected = probe.hf_logits(hf_folder, chunk.config.params_dtype)
    probe.compare(probe.checkpoint_logits(_build(chunk.shape, "float32"), found), expected)


def _copy_model_files(source: Path, target: Path, dtype: str) -> None:
    """Copy all files except weights: config (with `dtype`), tokenizer, generation settings, licence."""
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(path, target / path.name)
    config = read_config(target)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_safetensors(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int, progress: Callable[[str], None]
) -> None:
    """Write one file, or several with the index that transformers reads; their number is known only at the end."""
    shards: list[list[str]] = []
    total = 0
    for shard in _shards(tensors, shard_bytes):
        path = folder / f"shard-{len(shards)}"
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod((folder / "config.json").stat().st_mode)  # save_file keeps it to the owner, whatever the umask
        shards.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
        for name in shard:
            progress(name)
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE_FILE)
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1))


def _shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Group tensors into shards of at most `shard_bytes`; a larger tensor gets a shard of its own."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        if not_finite([(name, tensor)]):
            raise ValueError(
                f"expected finite weights, found NaN or infinite values in {name}, and wrote nothing; take an "
                "earlier checkpoint"
            )
        tensor = tensor.cpu().contiguous()
        # A view would keep the whole tensor of which it is a part in memory, and save_file refuses views.
        shard[name] = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        size += tensor.nbytes
    yield shard


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: the model needs {needed / 1e9:.3f} GB, {folder.parent} has "
            f"{free / 1e9:.3f} GB free",
        )
