"""What a run would do, worked out from its flags alone: no GPU, no Ray, no files needed.

    python -m sleuth.plan <the flags of train.py> [--gpu-memory-gb 80] [--require-files]

It validates the flags, the model's shape and the hooks, then prints placement, parallel layout, batch
arithmetic and memory. If something cannot work, it lists the problems and exits with 2. The memory
figures are estimates for choosing a layout; each function's docstring states its formula.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt
from rich.console import Console
from rich.table import Table

from sleuth.arguments import Args, Group, parse_args
from sleuth.arguments.model_scripts import known_model
from sleuth.arguments.table import flattened
from sleuth.cluster.preflight import preflight
from sleuth.hooks import describe_hooks

GB = 1e9
BF16, FP32 = 2, 4
EXAMPLE_LENGTHS = (512, 1024, 2048, 4096)
"""Tokens of a trajectory (prompt, turns and observations) for which micro-batches are estimated."""


class PlanOptions(Group):
    """Plan"""

    gpu_memory_gb: PositiveFloat = Field(80.0, description="Memory of one GPU, in 10^9 bytes.")
    available_gpus: PositiveInt | None = Field(
        None, description="GPUs of the cluster; a run that needs more is refused [not checked]."
    )
    require_files: bool = Field(False, description="Files of the run that are missing here are errors, not notes.")


class PlanArgs(PlanOptions, Args):
    """The flags of a run and those of the plan."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per GPU. The engine uses its share while it generates; activations and logits are held in training."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    engine_pool: float
    engine_weights: float
    kv_per_token: float

    @property
    def trainer(self) -> float:
        return self.resident + self.activations + self.logits

    @property
    def resident(self) -> float:
        """Bytes that the trainer holds while the engines generate."""
        return self.weights + self.gradients + self.optimizer

    @property
    def kv_tokens(self) -> int:
        """How many tokens the KV cache of one engine holds."""
        return max(0, int((self.engine_pool - self.engine_weights) / self.kv_per_token))


def num_parameters(args: Args) -> int:
    """The number of parameters of the model.

    Embedding V h (twice if untied); each layer: queries and output 2 h H c, keys and values 2 h G c, gated
    feed-forward 3 h f, two norms 2 h, query/key/value biases (H + 2 G) c, query/key norms 2 c; a last norm h.
    (V vocabulary, h width, H heads, G groups, c width of a head, f feed-forward width.) In a mixture of experts a
    router E h and E experts of 3 h e take the place of the feed-forward (E experts, e width of one).
    """
    hidden, heads, groups, head = _sizes(args, "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    layers, ffn, vocab = _sizes(args, "num_layers", "ffn_hidden_size", "vocab_size")
    layer = 2 * hidden * heads * head + 2 * hidden * groups * head + 2 * hidden
    layer += hidden * args.num_experts if args.num_experts else 3 * hidden * ffn
    layer += (heads + 2 * groups) * head if args.add_qkv_bias else 0
    layer += 2 * head if args.qk_layernorm else 0
    embeddings = vocab * hidden * (2 if args.untie_embeddings_and_output_weights else 1)
    return embeddings + layers * layer + hidden + expert_parameters(args)


def expert_parameters(args: Args) -> int:
    """How many of the `num_parameters` belong to experts, in all layers together; 0 for a dense model."""
    if not args.num_experts:
        return 0
    layers, hidden, width = _sizes(args, "num_layers", "hidden_size", "moe_ffn_hidden_size")
    return layers * args.num_experts * 3 * hidden * width


def _sizes(args: Args, *names: str) -> list[int]:
    sizes = [getattr(args, name) for name in names]
    assert None not in sizes, "the model flags are filled in by check_model"
    return sizes


def tokens_per_micro_batch(args: Args, context: int) -> int:
    """The most tokens of one forward pass on one GPU; `context` is the length of the longest trajectory."""
    if args.use_dynamic_batch_size:
        return max(args.max_tokens_per_gpu, context // args.context_parallel_size)
    return args.micro_batch_size * context // args.context_parallel_size


def memory_plan(args: Args, gpu_memory: float, context: int) -> MemoryPlan:
    """Estimate of the memory per GPU, in bytes.

    With N parameters over tensor x pipeline parallelism m = t p, and d x (context size) optimizer shards s (1 without
    the distributed optimizer): weights 2 N / m (bf16), gradients 4 N / m (fp32), Adam 12 N / (m s) (fp32 master
    weights and two moments), logits 2 x 4 V / t bytes for each token of --log-probs-chunk-size (values and gradient).
    Experts are over m = expert x expert-tensor x pipeline parallelism instead, their optimizer over the other ranks.
    Engine: its share of the GPU, of which weights 2 N / g over its g GPUs; KV cache per token
    2 (keys, values) x layers x groups x head width x 2 bytes / g.
    """
    parameters = num_parameters(args)
    tensor, engine = args.tensor_model_parallel_size, args.rollout_num_gpus_per_engine
    held, sharded = _parameters_per_gpu(args)
    vocab, layers, groups, head = _sizes(args, "vocab_size", "num_layers", "num_query_groups", "kv_channels")
    return MemoryPlan(
        weights=BF16 * held,
        gradients=FP32 * held,
        optimizer=3 * FP32 * sharded,
        activations=activation_bytes(args, tokens_per_micro_batch(args, context)),
        logits=2 * FP32 * vocab / tensor * args.log_probs_chunk_size,
        engine_pool=args.sglang_mem_fraction_static * gpu_memory,
        engine_weights=BF16 * parameters / engine,
        kv_per_token=2 * layers * groups * head * BF16 / engine,
    )


def _parameters_per_gpu(args: Args) -> tuple[float, float]:
    """How many parameters a GPU of the trainer holds, and for how many it keeps the optimizer's state."""
    experts = expert_parameters(args)
    expert_parallel = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    held = sharded = 0.0
    for count, split in ((num_parameters(args) - experts, args.tensor_model_parallel_size), (experts, expert_parallel)):
        share = count / (split * args.pipeline_model_parallel_size)
        ranks = args.actor_world_size // (split * args.pipeline_model_parallel_size)
        held += share
        sharded += share / ranks if args.use_distributed_optimizer else share
    return held, sharded


def activation_bytes(args: Args, tokens: int) -> float:
    """Activations kept for the backward pass of one micro-batch of `tokens` tokens.

    About 34 h bytes per token and layer with flash attention, of which tensor parallelism splits 24 h, and
    sequence parallelism the other 10 h too (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
    Transformer Models", sections 4.1 to 4.3; their 8 h feed-forward counted for f = 4 h). With full recomputation only
    2 h for each layer's input (split by sequence parallelism) and one layer in full. The first pipeline stage holds
    as many micro-batches as there are stages, and 1/p of the layers, so p cancels out.
    """
    hidden, layers = _sizes(args, "hidden_size", "num_layers")
    tensor = args.tensor_model_parallel_size
    outside = tensor if args.sequence_parallel else 1
    layer = hidden * (24 / tensor + 10 / outside)
    if args.recompute_granularity == "full":
        return tokens * (layers * 2 * hidden / outside + layer)
    return tokens * layers * layer


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


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan. Returns 0 if the run can work, else 2."""
    console = Console(width=120, soft_wrap=True, highlight=False)
    notes: list[str] = []
    try:
        args = parse_args(argv, model=PlanArgs)
        check_gpus(args)
        args = preflight(args, planning=not args.require_files, warn=notes.append)
    except (ValueError, OSError) as error:
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(str(error))
        return 2
    for title, rows in _sections(args):
        console.print(_table(title, rows))
    for note in (*_notes(args), *notes):
        console.print(f"note: {note}", markup=False)
    return 0


def _sections(args: PlanArgs) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    yield "Model", [("shape from", shape_source(args)), ("parameters", f"{num_parameters(args) / 1e9:.2f} billion")]
    yield "Placement", list(_placement(args))
    yield "Parallel layout of the trainer", list(_layout(args))
    yield "One step", list(_batches(args))
    yield f"Memory per GPU, of {args.gpu_memory_gb:g} GB (estimate)", list(_memory(args))
    yield "Hooks", describe_hooks(args)
    for section, values in args.custom_config.items():
        yield f"Settings of the hooks: {section}", flattened(values)


def _placement(args: Args) -> Iterator[tuple[str, str]]:
    train, rollout = args.actor_world_size, args.num_engines * args.rollout_num_gpus_per_engine
    how = f"max({train}, {rollout}), colocated" if args.colocate else f"{train} + {rollout}, separate"
    if args.debug_rollout_only:
        how, train = f"{rollout}, engines only", 0
    yield "GPUs in all", f"{args.total_gpus} = {how}"
    yield "trainer", f"{train} GPUs = {args.actor_num_nodes} nodes x {args.actor_num_gpus_per_node}"
    yield "engines", f"{args.num_engines} x {args.rollout_num_gpus_per_engine} GPUs (SGLang tensor parallelism)"


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
    sets = ", ".join(f"{name}: {path}" for name, path in args.eval_sets.items())
    yield "evaluation", f"every {args.eval_interval} steps: {sets}" if sets else "none"


def _memory(args: PlanArgs) -> Iterator[tuple[str, str]]:
    context = args.rollout_max_context_len or 0
    plan = memory_plan(args, args.gpu_memory_gb * GB, context)
    details = {"activations": f", of {tokens_per_micro_batch(args, context):,} tokens (a trajectory of full length)"}
    for name in ("weights", "gradients", "optimizer", "activations", "logits"):
        yield f"trainer: {name}", f"{getattr(plan, name) / GB:.1f} GB{details.get(name, '')}"
    yield "trainer: together", f"{plan.trainer / GB:.1f} GB"
    yield "engine: its share", f"{plan.engine_pool / GB:.1f} GB, of which weights {plan.engine_weights / GB:.1f} GB"
    yield "engine: KV cache", f"{plan.kv_per_token / 1e3:.1f} kB a token on each GPU, {plan.kv_tokens:,} tokens"
    if args.colocate:
        yield "host memory", f"{plan.weights / GB:.1f} GB a rank for each copy of weights kept aside (actor, reference)"


def _notes(args: PlanArgs) -> Iterator[str]:
    """Notes on what does not stop the plan, but would stop or hurt the run."""
    plan = memory_plan(args, args.gpu_memory_gb * GB, args.rollout_max_context_len or 0)
    lagging = args.colocate and args.update_weights_interval > 1
    needed = plan.trainer + (plan.engine_weights if lagging else 0)
    if needed > args.gpu_memory_gb * GB:
        beside = ", beside the weights that engines keep with --update-weights-interval above 1," if lagging else ""
        yield (
            f"the trainer{beside} needs about {needed / GB:.0f} GB of {args.gpu_memory_gb:g} GB; raise "
            f"--tensor-model-parallel-size{' or --expert-model-parallel-size' if args.num_experts else ''}, add "
            "--use-distributed-optimizer, or lower --max-tokens-per-gpu"
        )
    if args.colocate and plan.resident + plan.engine_pool > args.gpu_memory_gb * GB:
        yield (
            f"the trainer keeps about {plan.resident / GB:.0f} GB while the engines generate with "
            f"{plan.engine_pool / GB:.0f} of {args.gpu_memory_gb:g} GB; lower --sglang-mem-fraction-static, or raise "
            "--tensor-model-parallel-size"
        )
    if plan.kv_tokens == 0:
        yield "the engine's share does not hold its weights; raise --sglang-mem-fraction-static or its GPUs"


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2))
    table.add_column(min_width=38, no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


if __name__ == "__main__":
    sys.exit(main())
