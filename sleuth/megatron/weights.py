"""Hugging Face weights <-> the megatron model, for any tensor, pipeline and expert parallel layout.

Each parameter of the megatron model is one `Entry`: the Hugging Face tensors it is made of, and how it is
put together and sharded. TransformerEngine's layers keep a norm inside the linear layer after it
(`linear_qkv.layer_norm_weight`), local layers beside it; the map knows both names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from torch import Tensor

from sleuth.megatron.model import ModelShape, PolicyModel

Layout = Literal["replicated", "column", "row", "qkv", "gated"]
"""How tensor parallelism cuts a parameter: not; by rows; by columns; by rows, with queries, keys and values
interleaved by group; by rows of each of two stacked matrices."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter of this rank's model, and what it is called and made of in a Hugging Face checkpoint."""

    parameter: torch.nn.Parameter
    hf_names: tuple[str, ...]
    layout: Layout
    expert: bool = False
    tied_copy: bool = False
    """The last pipeline stage's copy of the embedding."""


class WeightMap:
    """The map for one rank's part of the model, whose `chunks` come from `build_model`."""

    def __init__(self, chunks: Sequence[PolicyModel], shape: ModelShape) -> None:
        self.shape = shape
        self.entries = [entry for chunk in chunks for entry in _entries(chunk, shape)]

    @torch.no_grad()
    def load(self, read: Callable[[str], Tensor]) -> None:
        """Fill the model; `read(name)` gives whole tensors. ValueError names a tensor that does not fit."""
        for entry in self.entries:
            whole = [read(name) for name in entry.hf_names]
            local = self._shard(entry, whole)
            if local.shape != entry.parameter.shape:
                shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in zip(entry.hf_names, whole, strict=True))
                raise ValueError(
                    f"{shapes} does not fit the model's config: this rank's part is {list(local.shape)}, "
                    f"expected {list(entry.parameter.shape)}; config.json and weights must be of the same model"
                )
            entry.parameter.copy_(local)

    @torch.no_grad()
    def stage_tensors(
        self, value: Callable[[torch.nn.Parameter], Tensor] = lambda p: p.detach()
    ) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of this pipeline stage in Hugging Face names; collective over tensor and expert parallel ranks.

        `value` may give something else of a parameter's shape, such as its gradient.
        """
        for entry in self.entries:
            if entry.tied_copy:
                continue
            whole = self._unshard(entry, value(entry.parameter))
            if entry.expert:
                yield from self._gather_experts(entry, whole)
            else:
                yield from zip(entry.hf_names, whole, strict=True)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of the model in Hugging Face names, on every rank; every rank must iterate to the end."""
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            yield from self.stage_tensors()
            return
        mine = [(name, tensor.shape) for name, tensor in self.stage_tensors()]
        stages: list[list[tuple[str, torch.Size]]] = [[] for _ in range(group.size())]
        dist.all_gather_object(stages, mine, group=group)
        first = self.entries[0].parameter
        for stage, names in enumerate(stages):
            own = self.stage_tensors() if stage == group.rank() else None
            for name, shape in names:
                tensor = (
                    next(own)[1].contiguous() if own else torch.empty(shape, dtype=first.dtype, device=first.device)
                )
                dist.broadcast(tensor, dist.get_global_rank(group, stage), group=group)
                yield name, tensor

    def _shard(self, entry: Entry, whole: list[Tensor]) -> Tensor:
        size, rank = _tensor_parallel(entry)
        if entry.layout == "qkv":
            return _merge_qkv(whole, self.shape.num_query_groups).chunk(size)[rank]
        if entry.layout == "gated":
            return torch.cat([tensor.chunk(size)[rank] for tensor in whole])
        if entry.layout == "column":
            return whole[0].chunk(size)[rank]
        if entry.layout == "row":
            return whole[0].chunk(size, 1)[rank]
        return whole[0]

    def _unshard(self, entry: Entry, local: Tensor) -> list[Tensor]:
        if entry.layout == "qkv":
            return _split_qkv(_gather(local, 0, entry), self.shape)
        if entry.layout == "gated":
            return [_gather(half, 0, entry) for half in local.chunk(2)]
        if entry.layout == "column":
            return [_gather(local, 0, entry)]
        if entry.layout == "row":
            return [_gather(local, 1, entry)]
        return [local]

    def _gather_experts(self, entry: Entry, whole: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of an expert and of its counterparts on the other expert-parallel ranks."""
        group = parallel_state.get_expert_model_parallel_group()
        if group.size() == 1:
            yield from zip(entry.hf_names, whole, strict=True)
            return
        names: list[tuple[str, ...]] = [()] * group.size()
        dist.all_gather_object(names, entry.hf_names, group=group)
        for position, tensor in enumerate(whole):
            parts = _all_gather(tensor, group)
            for rank, part in enumerate(parts):
                yield names[rank][position], part


def _entries(model: PolicyModel, shape: ModelShape) -> list[Entry]:
    parameters = dict(model.named_parameters())
    entries = {
        name: Entry(parameters[name], hf_names, layout, ".experts." in name, tied_copy)
        for name, hf_names, layout, tied_copy in _names(model, shape)
        if name in parameters
    }
    unknown = set(parameters) - set(entries)
    assert not unknown, f"parameters without a Hugging Face name: {sorted(unknown)}"
    return list(entries.values())


def _names(model: PolicyModel, shape: ModelShape) -> Iterator[tuple[str, tuple[str, ...], Layout, bool]]:
    """Candidates (megatron name, Hugging Face names, layout, whether a tied copy); a model has some of them."""
    for index, layer in enumerate(model.decoder.layers):
        ours, theirs = f"decoder.layers.{index}.", f"model.layers.{layer.layer_number - 1}."
        for name, hf_names, layout in _layer_names(shape):
            yield ours + name, tuple(theirs + hf_name for hf_name in hf_names), layout, False
    embedding = "model.embed_tokens.weight"
    tied = not shape.untie_embeddings_and_output_weights
    yield "embedding.word_embeddings.weight", (embedding,), "column", False
    yield "decoder.final_layernorm.weight", ("model.norm.weight",), "replicated", False
    yield "output_layer.weight", (embedding if tied else "lm_head.weight",), "column", tied


def _layer_names(shape: ModelShape) -> Iterator[tuple[str, tuple[str, ...], Layout]]:
    for name in ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"):
        yield name, ("input_layernorm.weight",), "replicated"
    for kind in ("weight", "bias"):
        yield f"self_attention.linear_qkv.{kind}", tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv"), "qkv"
    for x in "qk":
        yield f"self_attention.{x}_layernorm.weight", (f"self_attn.{x}_norm.weight",), "replicated"
    yield "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "row"
    for name in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"):
        yield name, ("post_attention_layernorm.weight",), "replicated"
    yield "mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gated"
    yield "mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "row"
    if shape.num_experts:
        yield "mlp.router.weight", ("mlp.gate.weight",), "replicated"
        local = shape.num_experts // parallel_state.get_expert_model_parallel_world_size()
        first = local * parallel_state.get_expert_model_parallel_rank()
        for index in range(local):
            ours, theirs = f"mlp.experts.local_experts.{index}.", f"mlp.experts.{first + index}."
            yield f"{ours}linear_fc1.weight", (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight"), "gated"
            yield f"{ours}linear_fc2.weight", (f"{theirs}down_proj.weight",), "row"


def _merge_qkv(whole: list[Tensor], groups: int) -> Tensor:
    """Queries, keys, values -> megatron's rows: for each group its queries, its key, its value."""
    tail = whole[0].shape[1:]
    return torch.cat([tensor.reshape(groups, -1, *tail) for tensor in whole], 1).reshape(-1, *tail)


def _split_qkv(merged: Tensor, shape: ModelShape) -> list[Tensor]:
    heads, width, tail = shape.num_attention_heads // shape.num_query_groups, shape.kv_channels, merged.shape[1:]
    parts = merged.reshape(shape.num_query_groups, -1, *tail).split([heads * width, width, width], 1)
    return [part.reshape(-1, *tail) for part in parts]


def _tensor_parallel(entry: Entry) -> tuple[int, int]:
    group = _tensor_parallel_group(entry)
    return group.size(), group.rank()


def _tensor_parallel_group(entry: Entry) -> dist.ProcessGroup:
    if entry.expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _gather(local: Tensor, dim: int, entry: Entry) -> Tensor:
    parts = _all_gather(local, _tensor_parallel_group(entry))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


class HfWeights:
    """The tensors of a Hugging Face folder's safetensors files, read one at a time.

    Raises ValueError if the folder holds none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"expected *.safetensors files in {folder}, found none")
        self._files = [safe_open(file, framework="pt") for file in files]
        self._owner = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

    @property
    def names(self) -> list[str]:
        return list(self._owner)

    def read(self, name: str) -> Tensor:
        """The whole tensor on the CPU. ValueError if the files do not hold it."""
        if name not in self._owner:
            raise ValueError(f"expected tensor {name} in {self.folder}, found {len(self._owner)} others")
        tensor: Tensor = self._owner[name].get_tensor(name)
        return tensor
