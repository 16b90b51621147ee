"""How much memory a run takes on each GPU, by formulas: of the trainer, of the engines, and of both in their turns.

Pure arithmetic on the flags. `tests/fake_cuda` holds the trainer's part to the real model's, traced without a GPU,
within 10%. What no trace can show (contexts, communication buffers, graphs) stands in named constants: estimates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sleuth.arguments import Args

GB = 1e9
BF16, FP32 = 2, 4

USABLE_GB: dict[float, float] = {80: 84.9, 96: 102.0, 141: 150.0}
"""10^9 bytes that CUDA finds on GPUs that are sold with so many "GB": A100 and H100, H20, H200."""
TRAINER_CONTEXT = 2.0 * GB
"""A trainer process holds this besides tensors: CUDA context, NCCL's buffers, fragments of the allocator."""
ENGINE_CONTEXT = 1.5 * GB
"""An engine process holds this besides weights and KV cache, also while its memory is released."""
ENGINE_GRAPHS = 2.0 * GB
"""CUDA graphs of an engine, which stay unless SGLANG_MEMORY_SAVER_CUDA_GRAPH=1 is set for it."""
SYNC_BUFFERS = 1.5 * GB
"""Buckets of weights on their way to the engines, and the probe's forward pass."""
EXPERT_IMBALANCE = 2.0
"""Tokens that the busiest rank's experts get, over the mean."""
BACKWARD_SHARE = 0.5
"""Gradients of activations within a layer, over its activations."""

SHORTEST_CONTEXT = 1024
"""Tokens; a shorter trajectory holds no search and its answer."""


def gpu_bytes(gigabytes: float) -> float:
    """Bytes of a GPU that is sold as 80, 96 or 141 GB; any other number is one of 10^9 bytes."""
    return USABLE_GB.get(gigabytes, gigabytes) * GB


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per GPU. The engine's share is held while it generates; activations and head while the trainer works."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    head: float
    engine_pool: float
    engine_weights: float
    kv_per_token: float

    @property
    def resident(self) -> float:
        """The trainer's tensors between two steps; all of it is lent while colocated engines generate."""
        return self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> float:
        """The trainer's tensors where they are most: at the end of a forward pass, or amid the backward one."""
        return self.resident + self.activations + self.head

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache of one engine holds."""
        return max(0, int((self.engine_pool - self.engine_weights) / self.kv_per_token))


def turns(args: Args, plan: MemoryPlan) -> dict[str, float]:
    """What a GPU must hold, by what it does (see `sleuth.cluster.memory_turns`)."""
    engine = ENGINE_CONTEXT + ENGINE_GRAPHS
    if not args.num_engines or not args.trains or not args.colocate:
        training = {} if not args.trains else {"training": plan.peak + TRAINER_CONTEXT}
        return training | ({"generating": plan.engine_pool + engine} if args.num_engines else {})
    contexts = TRAINER_CONTEXT + engine
    kept = plan.engine_weights if args.update_weights_interval > 1 else 0.0
    needed = {
        "generating": plan.engine_pool + contexts,
        "training": plan.peak + kept + contexts,
        "syncing": plan.weights + plan.engine_weights + SYNC_BUFFERS + contexts,
    }
    return needed | ({"saving": plan.resident + plan.engine_weights + contexts} if args.save else {})


def host_bytes(args: Args, plan: MemoryPlan) -> float:
    """Pinned host memory of a rank: what it lends but the gradients, and for a reference two copies of the weights."""
    reference = 2 * plan.weights if args.use_kl_loss or args.kl_coef else 0.0
    return plan.weights + plan.optimizer + reference


def num_parameters(args: Args) -> int:
    """Parameters of the model.

    Embedding V h (twice if untied); each layer: queries and output 2 h H c, keys and values 2 h G c, gated
    feed-forward 3 h f, two norms 2 h, query/key/value biases (H + 2 G) c, query/key norms 2 c; a last norm h.
    (V vocabulary, h width, H heads, G groups, c width of a head, f feed-forward width.) In a mixture of experts a
    router E h and E experts of 3 h e take the place of the feed-forward (E experts, e width of one).
    """
    hidden, heads, groups, head = _sizes(args, "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    layers, ffn = _sizes(args, "num_layers", "ffn_hidden_size")
    layer = 2 * hidden * heads * head + 2 * hidden * groups * head + 2 * hidden
    layer += hidden * args.num_experts if args.num_experts else 3 * hidden * ffn
    layer += (heads + 2 * groups) * head if args.add_qkv_bias else 0
    layer += 2 * head if args.qk_layernorm else 0
    embeddings = _embedding(args) * (2 if args.untie_embeddings_and_output_weights else 1)
    return embeddings + layers * layer + hidden + expert_parameters(args)


def expert_parameters(args: Args) -> int:
    """Parameters of the experts of all layers together, part of `num_parameters`; 0 for a dense model."""
    if not args.num_experts:
        return 0
    layers, hidden, width = _sizes(args, "num_layers", "hidden_size", "moe_ffn_hidden_size")
    return layers * args.num_experts * 3 * hidden * width


def _embedding(args: Args) -> int:
    vocab, hidden = _sizes(args, "vocab_size", "hidden_size")
    return vocab * hidden


def _sizes(args: Args, *names: str) -> list[int]:
    sizes = [getattr(args, name) for name in names]
    assert None not in sizes, "the model flags are filled in by check_model"
    return sizes


def tokens_per_micro_batch(args: Args, context: int) -> int:
    """Tokens of one forward pass on one GPU, at most; `context` is the longest trajectory."""
    if args.use_dynamic_batch_size:
        return max(args.max_tokens_per_gpu, context // args.context_parallel_size)
    return args.micro_batch_size * context // args.context_parallel_size


def memory_plan(args: Args, gpu_memory: float, context: int) -> MemoryPlan:
    """Estimate of the memory per GPU, in bytes.

    With N parameters over tensor x pipeline parallelism m = t p, and d x (context size) optimizer shards s (1 without
    the distributed optimizer): weights 2 N / m (bf16), gradients 4 N / m (fp32), Adam 12 N / (m s) (fp32 master
    weights and two moments). The first and the last pipeline stage hold an embedding each beside their layers. Experts
    are over m = expert x expert-tensor x pipeline parallelism instead, their optimizer over the other ranks.
    Engine: its share of the GPU, of which weights 2 N / g over its g GPUs; KV cache per token
    2 (keys, values) x layers x groups on a GPU x head width x 2 bytes, every GPU having one group at least.
    """
    tokens, engine = tokens_per_micro_batch(args, context), args.rollout_num_gpus_per_engine
    held, sharded = _parameters_per_gpu(args)
    layers, groups, head = _sizes(args, "num_layers", "num_query_groups", "kv_channels")
    return MemoryPlan(
        weights=BF16 * held,
        gradients=FP32 * held,
        optimizer=3 * FP32 * sharded,
        activations=activation_bytes(args, tokens),
        head=head_bytes(args, tokens),
        engine_pool=args.sglang_mem_fraction_static * gpu_memory,
        engine_weights=BF16 * num_parameters(args) / engine,
        kv_per_token=2 * layers * max(1, groups / engine) * head * BF16,
    )


def _parameters_per_gpu(args: Args) -> tuple[float, float]:
    """Parameters that a GPU of the trainer holds, and of how many it keeps the optimizer's state."""
    experts, stages = expert_parameters(args), args.pipeline_model_parallel_size
    expert_parallel = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    ends = _embedding(args) * (2 if args.untie_embeddings_and_output_weights else 1)
    layers = num_parameters(args) - experts - ends
    dense = layers / stages + (ends if stages == 1 else _embedding(args))
    held = sharded = 0.0
    for count, split in ((dense, args.tensor_model_parallel_size), (experts / stages, expert_parallel)):
        share = count / split
        ranks = args.actor_world_size // (split * stages)
        held += share
        sharded += share / ranks if args.use_distributed_optimizer else share
    return held, sharded


def activation_bytes(args: Args, tokens: int) -> float:
    """Activations kept for the backward pass of one micro-batch of `tokens` tokens, before the output layer.

    With full recomputation they are each layer's input, 2 h a token (split by sequence parallelism), and one layer in
    full with its gradients, where that is more than what the output layer takes (`head_bytes`), which is gone by then.
    The first pipeline stage holds as many micro-batches as there are stages, and 1/p of the layers: p cancels out.
    """
    hidden, layers = _sizes(args, "hidden_size", "num_layers")
    layer = tokens * layer_bytes_per_token(args)
    if args.recompute_granularity != "full":
        return layers * layer
    inputs = tokens * layers * BF16 * hidden / _norm_split(args)
    return inputs + max(0.0, layer * (1 + BACKWARD_SHARE) - head_bytes(args, tokens))


def layer_bytes_per_token(args: Args) -> float:
    """What one layer keeps of a token for its backward pass, in bytes, with the layers that need no TransformerEngine.

    Attention: queries, keys and values as projected and as rotated (once more where they are normalised), its output
    for each sequence and joined: 2 (H + 2 G) c + 2 (H + G) c + 4 H c. Feed-forward: gate and value 4 f, the gate's
    SiLU, the value once more, their product 2 f each. Tensor parallelism splits these. The residual before each of the
    two norms and what they give to the matrices, 8 h, are split by sequence parallelism only.
    """
    hidden, heads, groups, head = _sizes(args, "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    (ffn,) = _sizes(args, "ffn_hidden_size")
    attention = BF16 * head * ((heads + 2 * groups) + (heads + groups) * (2 if args.qk_layernorm else 1) + 2 * heads)
    tensor = args.tensor_model_parallel_size
    if args.num_experts:
        # Sequence parallelism gives each rank its own tokens; each goes to k experts, in and out of them once.
        width, chosen = args.moe_ffn_hidden_size or 0, args.moe_router_topk or 1
        feed = EXPERT_IMBALANCE * chosen * BF16 * (2 * hidden + 5 * width) / _norm_split(args)
    else:
        feed = BF16 * 5 * ffn / tensor
    return attention / tensor + feed + BF16 * 4 * hidden / _norm_split(args)


def head_bytes(args: Args, tokens: int) -> float:
    """What the output layer takes in its backward pass (see `sleuth.megatron.logprobs`).

    Logits of a chunk of C tokens in fp32, and once more in bf16: 6 C V / t; the matrix's gradient in fp32 and one
    chunk's part of it in bf16: 6 h V / t; the hidden states of all tokens, gathered, picked and their gradient: 6 h T.
    """
    vocab, hidden = _sizes(args, "vocab_size", "hidden_size")
    rows = vocab / args.tensor_model_parallel_size
    return (FP32 + BF16) * rows * (min(args.log_probs_chunk_size, tokens) + hidden) + 3 * BF16 * hidden * tokens


def _norm_split(args: Args) -> int:
    """Over how many GPUs the activations around norms are split."""
    return args.tensor_model_parallel_size if args.sequence_parallel else 1


def checkpoint_bytes(args: Args) -> float:
    """What a checkpoint takes on the disk: weights in bf16, and Adam's float32 weights and two moments."""
    return num_parameters(args) * (BF16 + 3 * FP32)


def complaint(args: Args, gpu_memory: float, context: int) -> str | None:
    """What does not fit on a GPU of `gpu_memory` bytes, and the flags that would make it fit; None: all fits."""
    too_much = _too_much(args, gpu_memory, context)
    if not too_much:
        return None
    if flags := fitting_flags(args, gpu_memory, context):
        remedy = f"it would fit with {' '.join(flags)}"
    elif shorter := _shorter(args, gpu_memory, context):
        remedy = f"use more GPUs, or larger ones, or cut trajectories short: it would fit with {' '.join(shorter)}"
    else:
        remedy = "use more GPUs, or larger ones"
    return f"memory: {'; '.join(too_much)}; {remedy}"


def _shorter(args: Args, gpu_memory: float, context: int) -> list[str]:
    """Flags with which the run fits, the longest trajectory that does among them; [] if none of 1,024 tokens does."""
    while (context := context // 2) >= SHORTEST_CONTEXT:
        fixed = f"--rollout-max-context-len {context}"
        if fits(args, gpu_memory, context):
            return [fixed]
        if flags := fitting_flags(args, gpu_memory, context):
            return [fixed, *flags]
    return []


def fits(args: Args, gpu_memory: float, context: int) -> bool:
    """Whether the memory suffices for all that a GPU does, and an engine's for a trajectory of full length."""
    return not _too_much(args, gpu_memory, context)


def _too_much(args: Args, gpu_memory: float, context: int) -> list[str]:
    plan = memory_plan(args, gpu_memory, context)
    found = [
        f"{what} takes {size / GB:.1f} GB, expected at most the {gpu_memory / GB:.1f} GB of a GPU"
        for what, size in turns(args, plan).items()
        if size > gpu_memory
    ]
    if args.num_engines and plan.kv_tokens < max(1, context):
        found.append(
            f"an engine's KV cache has room for {plan.kv_tokens:,} tokens beside {plan.engine_weights / GB:.1f} GB of "
            f"weights, expected room for a trajectory of {context:,}"
        )
    return found


def fitting_flags(args: Args, gpu_memory: float, context: int) -> list[str]:
    """Flags to add, each `--name value`, with which the run fits: one if one suffices, else the first few that do."""
    changes = list(_changes(args, context))

    def suffices(chosen: Iterable[tuple[str, dict[str, Any]]]) -> bool:
        update = {name: value for _, part in chosen for name, value in part.items()}
        return fits(args.model_copy(update=update), gpu_memory, context)

    for change in changes:
        if suffices([change]):
            return [change[0]]
    chosen: dict[str, tuple[str, dict[str, Any]]] = {}
    for flags, update in changes:
        chosen[flags.split()[0]] = (flags, update)  # in the place of a smaller change by the same flag
        if suffices(chosen.values()):
            break
    else:
        return []
    for name in list(chosen):
        fewer = {other: change for other, change in chosen.items() if other != name}
        if suffices(fewer.values()):
            chosen = fewer
    return [flags for flags, _ in chosen.values()]


def _changes(args: Args, context: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes of the layout that save memory, and keep it valid, the cheapest first."""
    tensor, world = args.tensor_model_parallel_size, args.actor_world_size
    groups = args.num_query_groups or 1
    for fraction in (0.7, 0.6, 0.5, 0.4):
        if fraction < args.sglang_mem_fraction_static:
            yield f"--sglang-mem-fraction-static {fraction}", {"sglang_mem_fraction_static": fraction}
    if not args.use_distributed_optimizer and args.data_parallel_size * args.context_parallel_size > 1:
        yield "--use-distributed-optimizer", {"use_distributed_optimizer": True}
    if tensor > 1 and not args.sequence_parallel:
        yield "--sequence-parallel", {"sequence_parallel": True}
    if args.recompute_granularity != "full":
        flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        yield flags, {"recompute_granularity": "full"}
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu > max(context, 1):
        yield f"--max-tokens-per-gpu {context}", {"max_tokens_per_gpu": context}
    experts = args.num_experts or 1
    for size in (2, 4, 8):
        if size > args.expert_model_parallel_size and not experts % size and not world % size:
            yield f"--expert-model-parallel-size {size}", {"expert_model_parallel_size": size}
    for size in (2, 4, 8):
        if size > tensor and not groups % size and not world % size:
            flags = f"--tensor-model-parallel-size {size}"
            yield (
                flags if args.sequence_parallel else f"{flags} --sequence-parallel",
                {"tensor_model_parallel_size": size, "sequence_parallel": True},
            )
    gpus = args.num_engines * args.rollout_num_gpus_per_engine
    heads = args.num_attention_heads or 1
    for size in (2, 4, 8):
        if size > args.rollout_num_gpus_per_engine and not gpus % size and not heads % size:
            yield f"--rollout-num-gpus-per-engine {size}", {"rollout_num_gpus_per_engine": size}


def checkpoints_kept(args: Args) -> int:
    """How many checkpoints lie in --save at most: the oldest goes once the newest is whole, the good one stays."""
    saves = math.ceil(args.num_rollout / args.save_interval)
    return min(saves, max(args.save_keep, 2) + 1) if args.save_keep else saves
