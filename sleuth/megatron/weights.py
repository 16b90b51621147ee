"""Maps Hugging Face weights to the megatron model and back, for any tensor, pipeline and expert parallel layout.

Each parameter of the megatron model is one `Entry`: the Hugging Face tensors of which it consists, and how they are
put together and sharded. TransformerEngine's layers keep a norm inside the linear layer that follows it
(`linear_qkv.layer_norm_weight`), local layers beside it; the map knows both names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from sleuth.megatron.hf_files import HfWeights
from sleuth.megatron.model import ModelShape, PolicyModel

Layout = Literal["replicated", "column", "row", "qkv", "gated"]
"""How tensor parallelism cuts a parameter: not; by rows; by columns; by rows, with queries, keys and values
interleaved by group; by rows of each of two stacked matrices."""


_EMBEDDING, _FINAL_NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter of this rank's model, and the tensors of a Hugging Face checkpoint of which it consists."""

    parameter: torch.nn.Parameter
    hf_names: tuple[str, ...]
    layout: Layout
    expert: bool = False
    tied_copy: bool = False
    """Whether this is the copy of the embedding that the last pipeline stage has."""


class WeightMap:
    """The map for one rank's part of the model, whose `chunks` come from `build_model`."""

    def __init__(self, chunks: Sequence[PolicyModel], shape: ModelShape) -> None:
        self.shape = shape
        self.entries = [entry for chunk in chunks for entry in _entries(chunk, shape)]

    @torch.no_grad()
    def load(self, read: Callable[[str], Tensor]) -> None:
        """Fill the model; `read(name)` returns whole tensors. ValueError names a tensor that does not fit."""
        for entry in self.entries:
            entry.parameter.copy_(self._local(entry, read))

    def check(self, read: Callable[[str], Tensor]) -> None:
        """Raise ValueError, which names the tensor, if one does not fit. The tensors of `read` need no values."""
        for entry in self.entries:
            self._local(entry, read)

    def values(self, read: Callable[[str], Tensor]) -> Callable[[torch.nn.Parameter], Tensor]:
        """A function that returns, for a parameter, the values with which `load` would fill it."""
        entries = {id(entry.parameter): entry for entry in self.entries}
        return lambda parameter: self._local(entries[id(parameter)], read)

    def _local(self, entry: Entry, read: Callable[[str], Tensor]) -> Tensor:
        whole = [read(name) for name in entry.hf_names]
        try:
            local = self._shard(entry, whole)
            found = str(list(local.shape))
        except RuntimeError:
            found = "none, for they do not go together"
        if found != str(list(entry.parameter.shape)):
            shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in zip(entry.hf_names, whole, strict=True))
            raise ValueError(
                f"{shapes} does not fit the model's config: this rank's part is {found}, "
                f"expected {list(entry.parameter.shape)}; config.json and weights must be of the same model"
            )
        return local

    @torch.no_grad()
    def stage_tensors(
        self, value: Callable[[torch.nn.Parameter], Tensor] = lambda p: p.detach()
    ) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of this pipeline stage, by Hugging Face name; collective over tensor and expert parallel ranks.

        `value` may return something else that has a parameter's shape, such as its gradient; or, on the meta device,
        only the shape: then no values are gathered.
        """
        for entry in self.entries:
            if entry.tied_copy:
                continue
            whole = self._unshard(entry, value(entry.parameter))
            if entry.expert:
                yield from self._gather_experts(entry, whole)
            else:
                yield from zip(entry.hf_names, whole, strict=True)

    def described(self) -> list[tuple[str, Tensor]]:
        """What `stage_tensors` gives, as tensors without values; collective over expert-parallel ranks."""
        return list(self.stage_tensors(lambda parameter: torch.empty_like(parameter, device="meta")))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of the model, by Hugging Face names, on every rank; every rank must iterate to the end.

        One after the other comes from its pipeline stage: no rank has the tensors of another stage for longer than the
        caller keeps them.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            yield from self.stage_tensors()
            return
        stages: list[list[tuple[str, torch.Size, torch.dtype]]] = [[] for _ in range(group.size())]
        mine = [(name, tensor.shape, tensor.dtype) for name, tensor in self.described()]
        dist.all_gather_object(stages, mine, group=group)
        where = self.entries[0].parameter.device
        for stage, described in enumerate(stages):
            own = self.stage_tensors() if stage == group.rank() else None
            for name, shape, dtype in described:
                tensor = next(own)[1].contiguous() if own else torch.empty(shape, dtype=dtype, device=where)
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


def hf_names(shape: ModelShape) -> list[str]:
    """The Hugging Face names of all tensors of the whole model."""
    experts = range(shape.num_experts or 0)
    names = {
        f"model.layers.{layer}.{name}"
        for layer in range(shape.num_layers)
        for _, hf_names, _ in _layer_names(shape, experts)
        for name in hf_names
    }
    heads = {_HEAD} if shape.untie_embeddings_and_output_weights else set()
    return sorted(names | heads | {_EMBEDDING, _FINAL_NORM})


def load_hf_weights(weights: WeightMap, folder: Path) -> None:
    """Fill the model from a Hugging Face folder; ValueError unless the folder holds exactly this model's tensors."""
    wanted, found = (dataclasses.asdict(shape) for shape in (weights.shape, ModelShape.from_hf(folder)))
    other = [name for name in wanted if wanted[name] != found[name] and name != "max_position_embeddings"]
    if other:
        raise ValueError(
            f"the model in {folder} is another than --hf-checkpoint: "
            + ", ".join(f"{name} is {found[name]}, expected {wanted[name]}" for name in other)
            + "; name a folder of the same model"
        )
    weights.load(checked_weights(folder, weights.shape).read)


def checked_weights(folder: Path, shape: ModelShape) -> HfWeights:
    """The tensors of a Hugging Face folder; ValueError unless they are those of the model of `shape`."""
    source = HfWeights(folder)
    tied = None if shape.untie_embeddings_and_output_weights else (_HEAD, _EMBEDDING)
    source.check(hf_names(shape), shape.num_layers, tied)
    return source


def _names(model: PolicyModel, shape: ModelShape) -> Iterator[tuple[str, tuple[str, ...], Layout, bool]]:
    """All possible parameters as (megatron name, Hugging Face names, layout, tied copy); a model has some of them."""
    experts = range(0)
    if shape.num_experts:
        local = shape.num_experts // parallel_state.get_expert_model_parallel_world_size()
        first = local * parallel_state.get_expert_model_parallel_rank()
        experts = range(first, first + local)
    for index, layer in enumerate(model.decoder.layers):
        ours, theirs = f"decoder.layers.{index}.", f"model.layers.{layer.layer_number - 1}."
        for name, hf_names, layout in _layer_names(shape, experts):
            yield ours + name, tuple(theirs + hf_name for hf_name in hf_names), layout, False
    tied = not shape.untie_embeddings_and_output_weights
    yield "embedding.word_embeddings.weight", (_EMBEDDING,), "column", False
    yield "decoder.final_layernorm.weight", (_FINAL_NORM,), "replicated", False
    yield "output_layer.weight", (_EMBEDDING if tied else _HEAD,), "column", tied


def _layer_names(shape: ModelShape, experts: range) -> Iterator[tuple[str, tuple[str, ...], Layout]]:
    """A layer's parameters, with the `experts` that this rank holds; norms under both of their names."""
    for name in ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"):
        yield name, ("input_layernorm.weight",), "replicated"
    for kind in ("weight", "bias") if shape.add_qkv_bias else ("weight",):
        yield f"self_attention.linear_qkv.{kind}", tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv"), "qkv"
    for x in "qk" if shape.qk_layernorm else "":
        yield f"self_attention.{x}_layernorm.weight", (f"self_attn.{x}_norm.weight",), "replicated"
    yield "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "row"
    for name in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"):
        yield name, ("post_attention_layernorm.weight",), "replicated"
    if not shape.num_experts:
        yield from _mlp_names("mlp.", "mlp.")
        return
    yield "mlp.router.weight", ("mlp.gate.weight",), "replicated"
    for index, expert in enumerate(experts):
        yield from _mlp_names(f"mlp.experts.local_experts.{index}.", f"mlp.experts.{expert}.")
        yield from _mlp_names("mlp.experts.", f"mlp.experts.{expert}.", index)  # --moe-grouped-gemm


def _mlp_names(ours: str, theirs: str, number: int | str = "") -> Iterator[tuple[str, tuple[str, ...], Layout]]:
    """A feed-forward layer's matrices. Where one layer has those of all experts, they are numbered."""
    yield f"{ours}linear_fc1.weight{number}", (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight"), "gated"
    yield f"{ours}linear_fc2.weight{number}", (f"{theirs}down_proj.weight",), "row"


def _merge_qkv(whole: list[Tensor], groups: int) -> Tensor:
    """Merge queries, keys and values in megatron's order of rows: for each group its queries, its key, its value."""
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
    if group.size() == 1 or tensor.is_meta:
        return [tensor] * group.size()
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
