"""What a run would do, worked out from its flags alone: no GPU, no Ray, no files needed.

    python -m sleuth.plan <the flags of train.py> [--gpu-memory 80] [--cluster 4x8] [--require-files]

Validates the flags, the model's shape and the hooks, then prints placement, parallel layout, batch
arithmetic and memory (`sleuth.memory_plan`); with --cluster also which GPU of which node is for what. Exits
with 2 and the list of problems when something cannot work or does not fit, and names flags with which it
would fit.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt
from rich.console import Console
from rich.table import Table

from sleuth.arguments import Args, Group, parse_args
from sleuth.arguments.model_scripts import known_model
from sleuth.arguments.table import flattened
from sleuth.cluster.layout import LayoutError, Part, lay_out, parts
from sleuth.cluster.preflight import preflight
from sleuth.hooks import describe_hooks
from sleuth.memory_plan import (
    GB,
    checkpoint_bytes,
    checkpoints_kept,
    complaint,
    gpu_bytes,
    host_bytes,
    memory_plan,
    num_parameters,
    tokens_per_micro_batch,
    turns,
)
from sleuth.secrets import masked, redact

EXAMPLE_LENGTHS = (512, 1024, 2048, 4096)
"""Tokens of a trajectory (prompt, turns and observations) for which micro-batches are estimated."""


def _cluster(value: str) -> str:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", value):
        raise ValueError("expected NODESxGPUS, such as 4x8")
    return value


Cluster = Annotated[str, AfterValidator(_cluster)]


class PlanOptions(Group):
    """Plan"""

    gpu_memory_gb: PositiveFloat = Field(
        80.0,
        description="Memory of one GPU: 80, 96 and 141 are what CUDA finds on A100 and H100, H20, H200; any other "
        "number is one of 10^9 bytes. Also --gpu-memory.",
    )
    available_gpus: PositiveInt | None = Field(
        None, description="GPUs of the cluster; a run that needs more is refused [not checked]."
    )
    cluster: Cluster | None = Field(
        None,
        description="Nodes x GPUs of each, such as 4x8: print what each GPU of such a cluster is for, and refuse a run "
        "that does not fit there [not checked].",
    )
    require_files: bool = Field(False, description="Files of the run that are missing here are errors, not notes.")


class PlanArgs(PlanOptions, Args):
    """The flags of a run and those of the plan."""

    @property
    def gpu_memory(self) -> float:
        """Bytes."""
        return gpu_bytes(self.gpu_memory_gb)

    @property
    def context(self) -> int:
        """Tokens of the longest trajectory."""
        return self.rollout_max_context_len or 0

    @property
    def pretended_nodes(self) -> dict[str, int]:
        """GPUs of each node of --cluster."""
        count, gpus = map(int, (self.cluster or "0x0").split("x"))
        return {f"node {i}": gpus for i in range(count)}


def micro_batches(args: Args, tokens_per_sample: int) -> int:
    """Forward passes of one data-parallel rank in one optimizer step, for trajectories of this length."""
    samples = args.global_batch_size // args.data_parallel_size
    if not args.use_dynamic_batch_size:
        return samples // args.micro_batch_size
    fitting = args.max_tokens_per_gpu * args.context_parallel_size // tokens_per_sample
    return math.ceil(samples / max(1, fitting))


def shape_source(args: Args) -> str:
    """A phrase that says where the model's shape comes from."""
    if (Path(args.hf_checkpoint) / "config.json").is_file():
        return f"{args.hf_checkpoint}/config.json"
    known = known_model(args.hf_checkpoint)
    return f"{known.script} (the model is not here yet)" if known else "flags"


def check_gpus(args: PlanArgs) -> None:
    """ValueError if the run needs more GPUs than there are."""
    if args.available_gpus is not None and args.total_gpus > args.available_gpus:
        raise ValueError(
            f"expected at most the {args.available_gpus} GPUs that there are (NUM_GPUS, --available-gpus), found a run "
            f"of {args.total_gpus}: {dict(_placement(args))['GPUs in all']}; lower --actor-num-gpus-per-node and "
            "--rollout-num-gpus"
        )


def _fits_cluster(args: PlanArgs) -> None:
    try:
        lay_out(args, args.pretended_nodes)
    except LayoutError as error:
        raise ValueError(f"--cluster {args.cluster}: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan. Returns 0 if the run can work, else 2."""
    console = Console(width=120, soft_wrap=True, highlight=False)
    notes: list[str] = []
    try:
        args = parse_args(argv, model=PlanArgs)
        check_gpus(args)
        if args.cluster is not None:
            _fits_cluster(args)
        args = preflight(args, planning=not args.require_files, warn=notes.append)
    except (ValueError, OSError) as error:
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(redact(str(error)))
        return 2
    for title, rows in _sections(args):
        console.print(_table(title, rows))
    for note in notes:
        console.print(f"note: {redact(note)}", markup=False)
    if problem := complaint(args, args.gpu_memory, args.context):
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(problem)
        return 2
    return 0


def _sections(args: PlanArgs) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    yield "Model", [("shape from", shape_source(args)), ("parameters", f"{num_parameters(args) / 1e9:.2f} billion")]
    yield "Placement", list(_placement(args))
    if args.cluster is not None:
        yield f"Nodes of a pretended cluster, {args.cluster}", list(_nodes(args))
    yield "Parallel layout of the trainer", list(_layout(args))
    yield "One step", list(_batches(args))
    yield f"Memory per GPU, of {args.gpu_memory / GB:.1f} GB (estimate)", list(_memory(args))
    yield "Hooks", describe_hooks(args)
    for section, values in masked(args.custom_config).items():
        yield f"Settings of the hooks: {section}", flattened(values)


def _placement(args: Args) -> Iterator[tuple[str, str]]:
    train, rollout = args.actor_world_size, args.num_engines * args.rollout_num_gpus_per_engine
    how = f"max({train}, {rollout}), colocated" if args.colocate else f"{train} + {rollout}, separate"
    if not args.trains:
        how, train = f"{rollout}, engines only", 0
    yield "GPUs in all", f"{args.total_gpus} = {how}"
    yield "trainer", f"{train} GPUs = {args.actor_num_nodes} nodes x {args.actor_num_gpus_per_node}"
    yield "engines", f"{args.num_engines} x {args.rollout_num_gpus_per_engine} GPUs (SGLang tensor parallelism)"


def _nodes(args: PlanArgs) -> Iterator[tuple[str, str]]:
    """For each node what its GPUs are for, counted from 0 as far as the run takes them."""
    found = parts(args, lay_out(args, args.pretended_nodes))
    for node, gpus in args.pretended_nodes.items():
        first = 0
        for part in found.get(node, []):
            yield f"{node}, GPU {_span(first, len(part.devices))}", _role(part)
            first += len(part.devices)
        if first < gpus:
            yield f"{node}, GPU {_span(first, gpus - first)}", "free"


def _role(part: Part) -> str:
    trainer = f"trainer rank {_span(part.ranks[0], len(part.ranks))}" if part.ranks else ""
    engine = "" if part.engine is None else f"engine {part.engine}"
    return ", ".join(filter(None, (trainer, engine)))


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first} to {first + count - 1}"


def _layout(args: Args) -> Iterator[tuple[str, str]]:
    yield (
        "tensor x pipeline x context x data",
        f"{args.tensor_model_parallel_size} x {args.pipeline_model_parallel_size} x {args.context_parallel_size} x "
        f"{args.data_parallel_size} = {args.actor_world_size} GPUs",
    )
    if args.num_experts:
        yield (
            "expert x expert-tensor",
            f"{args.expert_model_parallel_size} x {args.expert_tensor_parallel_size}, {args.num_experts} experts",
        )
    yield "sequence parallel", "yes" if args.sequence_parallel else "no"
    yield "recompute", args.recompute_granularity or "no"
    yield "distributed optimizer", "yes" if args.use_distributed_optimizer else "no"


def _batches(args: Args) -> Iterator[tuple[str, str]]:
    yield (
        "samples",
        f"{args.rollout_batch_size} prompts x {args.n_samples_per_prompt} samples = {args.samples_per_step}",
    )
    yield (
        "optimizer steps",
        f"{args.samples_per_step} / global batch {args.global_batch_size} = {args.optimizer_steps_per_step}",
    )
    per_rank = args.global_batch_size // args.data_parallel_size
    yield "samples per rank and optimizer step", f"{args.global_batch_size} / {args.data_parallel_size} = {per_rank}"
    for length in EXAMPLE_LENGTHS:
        yield f"micro-batches at {length} tokens a sample", f"about {micro_batches(args, length)} per rank"
    yield "run", f"{args.num_rollout} steps, {args.num_rollout * args.rollout_batch_size:,} prompts"
    yield "checkpoints", f"every {args.save_interval} steps to {args.save}" if args.save else "none (no --save)"
    if args.save:
        kept, size = checkpoints_kept(args), checkpoint_bytes(args) / GB
        yield "disk for checkpoints", f"{kept} x {size:.1f} = {kept * size:.1f} GB at most"
    sets = ", ".join(f"{name}: {path}" for name, path in args.eval_sets.items())
    yield "evaluation", f"every {args.eval_interval} steps: {sets}" if sets else "none"


def _memory(args: PlanArgs) -> Iterator[tuple[str, str]]:
    plan = memory_plan(args, args.gpu_memory, args.context)
    tokens = tokens_per_micro_batch(args, args.context)
    details = {"activations": f", of {tokens:,} tokens (a trajectory of full length)"}
    for name in ("weights", "gradients", "optimizer", "activations", "head"):
        yield f"trainer: {name}", f"{getattr(plan, name) / GB:.1f} GB{details.get(name, '')}"
    yield "trainer: together", f"{plan.resident / GB:.1f} GB between steps, {plan.peak / GB:.1f} GB at the most"
    if args.num_engines:
        yield "engine: its share", f"{plan.engine_pool / GB:.1f} GB, of which weights {plan.engine_weights / GB:.1f} GB"
        yield "engine: KV cache", f"{plan.kv_per_token / 1e3:.1f} kB a token on each GPU, {plan.kv_tokens:,} tokens"
    for what, size in turns(args, plan).items():
        yield f"while {what}", f"{size / GB:.1f} GB, contexts and graphs included"
    if args.colocate and args.num_engines:
        yield "lent to the engines", f"{plan.resident / GB:.1f} GB, all of the trainer's but its context"
        yield "host memory", f"{host_bytes(args, plan) / GB:.1f} GB a rank, pinned"


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2))
    table.add_column(min_width=38, no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


if __name__ == "__main__":
    sys.exit(main())
