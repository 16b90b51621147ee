"""This rank's place among the trainer's processes, and the few collective operations that the trainer needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from sleuth.algo.context_parallel import zigzag_inverse
from sleuth.megatron import device

_TIMEOUT = timedelta(minutes=30)
ItemT = TypeVar("ItemT")
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Layout(Protocol):
    """The arguments that say how the ranks share the model and its sequences."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    context_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    sequence_parallel: bool
    num_layers_per_virtual_pipeline_stage: int | None


class ProcessSettings(Layout, Protocol):
    """The arguments that a rank needs to take its place."""

    seed: int
    cpu_threads_per_actor: int | None


def initialize(args: ProcessSettings, num_layers: int, store: dist.Store | None = None) -> None:
    """Join the process group, by `store` or at MASTER_ADDR and MASTER_PORT, as RANK of WORLD_SIZE; lay out the ranks.

    `num_layers`, those of the model, decides how many chunks a rank has in an interleaved pipeline.

    Raises ValueError if the layout does not divide the number of processes.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        place = {} if store is None else _place_at(store)
        dist.init_process_group(device.distributed_backend(), timeout=_TIMEOUT, **place)
    world = dist.get_world_size()
    if not torch.cuda.is_available():
        torch.set_num_threads(args.cpu_threads_per_actor or max(1, (os.cpu_count() or 1) // world))
    tp, pp, cp = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    if world % (tp * pp * cp):
        raise ValueError(
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} x --context-parallel-size {cp} "
            f"must divide the {world} trainer processes"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=_chunks(args, num_layers),
        context_parallel_size=cp,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    model_parallel_cuda_manual_seed(args.seed)


def _place_at(store: dist.Store) -> dict[str, Any]:
    return {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}


@contextmanager
def alone() -> Iterator[None]:
    """Inside the block this process is the only rank, in a process group of its own unless the caller has one."""
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)  # nothing is drawn from it, but megatron asks for its state
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        if own:
            dist.destroy_process_group()


def _chunks(args: Layout, num_layers: int) -> int | None:
    """The number of chunks of layers that a pipeline rank holds; None without interleaving."""
    if args.num_layers_per_virtual_pipeline_stage is None:
        return None
    layers = args.pipeline_model_parallel_size * args.num_layers_per_virtual_pipeline_stage
    if num_layers % layers:
        raise ValueError(
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} x "
            f"--num-layers-per-virtual-pipeline-stage {args.num_layers_per_virtual_pipeline_stage} must divide the "
            f"model's {num_layers} layers"
        )
    return num_layers // layers


def is_last_stage() -> bool:
    return parallel_state.is_pipeline_last_stage()


def is_first_copy() -> bool:
    """Whether no other rank of this stage that has the same samples comes before this one."""
    ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank()
    return ranks == (0, 0)


def sum_over_data(values: Tensor) -> Tensor:
    """Sum `values` over data- and context-parallel ranks, in place."""
    dist.all_reduce(values, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return values


def sum_over_context(values: Tensor) -> Tensor:
    """The sum over context-parallel ranks, which hold parts of the same samples, as a new tensor."""
    values = values.clone()
    dist.all_reduce(values, group=parallel_state.get_context_parallel_group())
    return values


def reduce_over_samples(values: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
    """The sum (max, min) over data-parallel ranks, which hold different samples, as a new tensor."""
    values = values.clone()
    dist.all_reduce(values, op=_REDUCTIONS[op], group=parallel_state.get_data_parallel_group())
    return values


def from_last_stage(values: Tensor) -> Tensor:
    """The values of the last pipeline stage, on every stage; `values` must have the same shape on all stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        dist.broadcast(values, dist.get_global_rank(group, group.size() - 1), group=group)
    return values


def gather_context(values: Tensor, lengths: list[int]) -> Tensor:
    """The whole row [T], in order, from this rank's part [t] of it."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts)[zigzag_inverse(lengths, group.size()).to(values.device)]


def raise_together(error: Exception | None) -> None:
    """Raise on every rank if any rank has an error, so that no rank waits for another for ever. Collective."""
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    first = next(((rank, text) for rank, text in enumerate(errors) if text), None)
    if first:
        raise RuntimeError(f"rank {first[0]} failed: {first[1]}")


def merged(mine: dict[str, ItemT]) -> dict[str, ItemT]:
    """The items of all ranks' dictionaries, on every rank. Collective."""
    parts: list[dict[str, ItemT]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {name: item for part in parts for name, item in part.items()}
