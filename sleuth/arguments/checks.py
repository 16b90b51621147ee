"""Checks of what must hold between settings. Each check yields sentences that say expected, found and remedy."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from sleuth.arguments.all_flags import AllFlags
from sleuth.arguments.switches import flag, ineffective_flags
from sleuth.data_path import DataPath
from sleuth.prompt_templates import PromptTemplate
from sleuth.secrets import MASK, is_secret


def find_problems(args: AllFlags, given: Collection[str] = ()) -> list[str]:
    """All contradictions of a configuration that can be found without files, GPUs or the model.

    `given`: the fields that the command line names, whatever their values.
    """
    checks = (
        _unsupported,
        _layout,
        _placement,
        _batches,
        _recompute,
        _model_flags,
        _loss,
        _slices,
        _prompt_template,
        _evaluation,
        _secrets,
    )
    return [*(problem for check in checks for problem in check(args)), *ineffective_flags(args, given)]


def nearest_divisors(total: int, wanted: int, multiple_of: int = 1) -> list[int]:
    """The divisors of `total` nearest to `wanted`, below and above, that are multiples of `multiple_of`."""
    divisors = [d for d in range(multiple_of, total + 1, multiple_of) if total % d == 0]
    below = [d for d in divisors if d < wanted]
    above = [d for d in divisors if d > wanted]
    return below[-1:] + above[:1]


def _unsupported(args: AllFlags) -> Iterator[str]:
    for name in ("attention_dropout", "hidden_dropout"):
        if getattr(args, name) != 0:
            yield f"{flag(name)}: expected 0 (dropout makes log-probabilities random), found {getattr(args, name)}"
    for name in ("accumulate_allreduce_grads_in_fp32", "attention_softmax_in_fp32"):
        if not getattr(args, name):
            yield f"--no-{flag(name)[2:]}: not supported, this is always done in fp32; leave the flag out"


def _layout(args: AllFlags) -> Iterator[str]:
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    context, world = args.context_parallel_size, args.actor_world_size
    if world % (tensor * pipeline * context):
        yield (
            f"tensor x pipeline x context parallelism = {tensor} x {pipeline} x {context} = "
            f"{tensor * pipeline * context} must divide the {world} training GPUs "
            f"(--actor-num-nodes {args.actor_num_nodes} x --actor-num-gpus-per-node {args.actor_num_gpus_per_node}); "
            "change one of the sizes"
        )
    expert = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    if world % (expert * pipeline):
        yield (
            f"expert x expert-tensor x pipeline parallelism = {args.expert_model_parallel_size} x "
            f"{args.expert_tensor_parallel_size} x {pipeline} = {expert * pipeline} must divide the {world} training "
            "GPUs; change one of the sizes"
        )
    if args.num_layers_per_virtual_pipeline_stage is not None and pipeline < 3:
        # With two stages, the next and the previous one are the same rank: messages of both passes would be mixed up.
        yield (
            "--num-layers-per-virtual-pipeline-stage: expected --pipeline-model-parallel-size of 3 or more, found "
            f"{pipeline}; leave it out or raise the latter"
        )
    if args.sequence_parallel and tensor == 1:
        yield (
            "--sequence-parallel needs --tensor-model-parallel-size above 1, found 1; leave it out or raise the latter"
        )
    needed = ("use_distributed_optimizer", "overlap_grad_reduce")
    if args.overlap_param_gather and (missing := [flag(name) for name in needed if not getattr(args, name)]):
        yield f"--overlap-param-gather needs {' and '.join(missing)}; add {'it' if len(missing) == 1 else 'them'}"


def _placement(args: AllFlags) -> Iterator[str]:
    if args.without_engines:
        return
    if args.rollout_num_gpus is None:
        yield (
            "expected --colocate (engines share the training GPUs) or --rollout-num-gpus (engines have their own), "
            "found neither; add one of them"
        )
    elif args.rollout_num_gpus % args.rollout_num_gpus_per_engine:
        yield (
            f"--rollout-num-gpus {args.rollout_num_gpus} must be a multiple of --rollout-num-gpus-per-engine "
            f"{args.rollout_num_gpus_per_engine}; change one of them"
        )
    if args.colocate and args.update_weights_through == "distributed":
        yield (
            "--update-weights-through distributed needs engines on GPUs of their own, since NCCL takes a GPU once; "
            "leave out --colocate, or take --update-weights-through tensor"
        )


def _batches(args: AllFlags) -> Iterator[str]:
    total, batch = args.samples_per_step, args.global_batch_size
    ranks = max(1, args.data_parallel_size)
    product = f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt}"
    if total % batch:
        yield (
            f"--global-batch-size {batch} must divide the {total} samples of a step ({product}); "
            f"{_nearest(nearest_divisors(total, batch, ranks) or nearest_divisors(total, batch))}"
        )
    elif batch % ranks:
        yield (
            f"--global-batch-size {batch} must be a multiple of the data-parallel size {ranks} "
            f"({args.actor_world_size} training GPUs over tensor x pipeline x context parallelism); "
            f"{_nearest(nearest_divisors(total, batch, ranks))}"
        )
    elif not args.use_dynamic_batch_size and batch % (ranks * args.micro_batch_size):
        yield (
            f"--micro-batch-size {args.micro_batch_size} must divide the {batch // ranks} samples that a data-parallel "
            f"rank has of an optimizer step (--global-batch-size {batch} over {ranks} ranks); "
            f"{_nearest(nearest_divisors(batch // ranks, args.micro_batch_size))}"
        )


def _nearest(values: list[int]) -> str:
    if not values:
        return "no value fits: change --rollout-batch-size or --n-samples-per-prompt"
    return f"the nearest valid values are {' and '.join(map(str, values))}"


def _recompute(args: AllFlags) -> Iterator[str]:
    given = [name for name in ("recompute_method", "recompute_num_layers") if getattr(args, name) is not None]
    if args.recompute_granularity == "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if name not in given:
                yield (
                    f"--recompute-granularity full needs {flag(name)}; add --recompute-method uniform "
                    "--recompute-num-layers 1"
                )
    elif given:
        names = ", ".join(flag(name) for name in given)
        yield f"{names}: only with --recompute-granularity full, found {args.recompute_granularity}; drop or change it"


def _model_flags(args: AllFlags) -> Iterator[str]:
    yield from divisibility_problems(
        args,
        heads=args.num_attention_heads,
        groups=args.num_query_groups,
        layers=args.num_layers,
        widths={"ffn_hidden_size": args.ffn_hidden_size},
    )
    if args.group_query_attention is False and args.num_query_groups not in (None, args.num_attention_heads):
        yield "--num-query-groups needs --group-query-attention; add it or drop --no-group-query-attention"


def divisibility_problems(
    args: AllFlags, *, heads: int | None, groups: int | None, layers: int | None, widths: Mapping[str, int | None]
) -> Iterator[str]:
    """Problems where the parallel layout does not divide a size of the model; None is a size not known yet."""
    tensor, engine = args.tensor_model_parallel_size, args.rollout_num_gpus_per_engine
    sizes = {"num_attention_heads": heads, "num_query_groups": groups, **widths}
    for name, size in sizes.items():
        if size is not None and size % tensor:
            yield (
                f"--tensor-model-parallel-size {tensor} must divide {flag(name)} {size}; "
                f"{_nearest(nearest_divisors(size, tensor))}"
            )
    per_chunk = args.num_layers_per_virtual_pipeline_stage
    if layers is not None and per_chunk is not None and layers % (args.pipeline_model_parallel_size * per_chunk):
        yield (
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} x "
            f"--num-layers-per-virtual-pipeline-stage {per_chunk} must divide --num-layers {layers}; change one of them"
        )
    elif layers is not None and layers % args.pipeline_model_parallel_size:
        yield (
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} must divide --num-layers {layers}; "
            f"{_nearest(nearest_divisors(layers, args.pipeline_model_parallel_size))}"
        )
    if heads is not None and heads % engine:
        yield (
            f"--rollout-num-gpus-per-engine {engine} must divide --num-attention-heads {heads}; "
            f"{_nearest(nearest_divisors(heads, engine))}"
        )


def expert_problems(args: AllFlags, experts: int | None, width: int | None) -> Iterator[str]:
    """Problems between the parallel layout and a mixture of `experts`, each `width` wide; None means a dense model."""
    tensor, parallel = args.tensor_model_parallel_size, args.expert_model_parallel_size
    if experts is None or width is None:
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if getattr(args, name) != 1:
                yield f"{flag(name)}: expected 1 for a model without experts, found {getattr(args, name)}; leave it out"
        return
    if experts % parallel:
        yield (
            f"--expert-model-parallel-size {parallel} must divide --num-experts {experts}; "
            f"{_nearest(nearest_divisors(experts, parallel))}"
        )
    if width % args.expert_tensor_parallel_size:
        yield (
            f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size} must divide --moe-ffn-hidden-size "
            f"{width}; {_nearest(nearest_divisors(width, args.expert_tensor_parallel_size))}"
        )
    if tensor > 1 and not args.sequence_parallel:
        yield (
            f"--tensor-model-parallel-size {tensor}: expected --sequence-parallel with it in a mixture of experts, "
            "found none; add it"
        )


def _loss(args: AllFlags) -> Iterator[str]:
    for name in ("use_kl_loss", "kl_coef"):
        if getattr(args, name) and args.ref_load is None:
            yield (
                f"{flag(name)} needs the frozen reference, found no --ref-load; pass the folder of "
                f"--hf-checkpoint, or one that tools/convert_hf_to_torch_dist.py made, or drop {flag(name)}"
            )
    yield from _overlong(args)
    if args.loss_type == "policy" and not args.custom_rm_path:
        yield "--custom-rm-path is required: name the reward hook, for example generate_with_search.reward_func"
    estimator = args.advantage_estimator
    if args.loss_type == "policy" and estimator != "reinforce_plus_plus" and args.n_samples_per_prompt == 1:
        yield (
            f"--n-samples-per-prompt 1 with --advantage-estimator {estimator}: a group of one has no advantage, so "
            "nothing is learned; take at least 2, or reinforce_plus_plus"
        )
    if estimator == "importance_sampling" and args.use_tis:
        yield (
            "--use-tis with --advantage-estimator importance_sampling corrects for the engine's probability twice; "
            "drop one of them"
        )
    if args.tis_clip_low > args.tis_clip:
        yield f"expected --tis-clip-low <= --tis-clip, found {args.tis_clip_low} > {args.tis_clip}; swap them"
    if args.min_lr > args.lr:
        yield f"expected --min-lr <= --lr, found {args.min_lr} > {args.lr}; lower --min-lr"
    if args.loss_type == "sft" and args.n_samples_per_prompt != 1:
        yield f"--loss-type sft: expected --n-samples-per-prompt 1, found {args.n_samples_per_prompt}; drop it"
    if args.debug_train_only is not None and args.debug_rollout_only:
        yield "--debug-train-only and --debug-rollout-only leave nothing to do; drop one of them"
    if args.loss_type == "sft" and args.debug_train_only is not None:
        yield "--debug-train-only: supervised training has no rollouts to read; drop it, or --loss-type sft"
    if args.loss_type == "sft" and args.debug_rollout_only:
        yield "--debug-rollout-only: supervised training has no rollouts; drop it, or --loss-type sft"


def _overlong(args: AllFlags) -> Iterator[str]:
    buffer, limit = args.overlong_buffer_len, args.rollout_max_response_len
    if buffer is not None and buffer > limit:
        yield (
            f"expected --overlong-buffer-len <= --rollout-max-response-len, found {buffer} > {limit}; lower the former"
        )


def _slices(args: AllFlags) -> Iterator[str]:
    for path in (args.prompt_data, *(args.eval_prompt_data or [])):
        try:
            DataPath.parse(path)
        except ValueError as error:
            yield str(error)


def _prompt_template(args: AllFlags) -> Iterator[str]:
    if args.prompt_template is not None:
        try:
            template = PromptTemplate.load(args.prompt_template)
        except ValueError as error:
            yield str(error)
            return
        if not isinstance(template.template, str) and not args.apply_chat_template:
            yield (
                f"--prompt-template {args.prompt_template} makes messages, which need --apply-chat-template; add it, "
                "or give a text"
            )


def _evaluation(args: AllFlags) -> Iterator[str]:
    pairs = args.eval_prompt_data
    if args.eval_interval is not None and not pairs:
        yield "--eval-interval needs evaluation sets; add --eval-prompt-data NAME PATH"
    if args.eval_only and not pairs:
        yield "--eval-only needs evaluation sets; add --eval-prompt-data NAME PATH"
    if args.eval_only and (args.loss_type == "sft" or args.debug_rollout_only):
        other = "--debug-rollout-only" if args.debug_rollout_only else "--loss-type sft"
        yield f"--eval-only with {other}: expected one of them, since each says what the run does; drop one"
    if pairs and args.eval_interval is None and not args.eval_only:
        yield (
            "--eval-prompt-data has no effect without --eval-interval; add --eval-interval 25 (or --eval-only), or "
            "drop the sets"
        )
    if pairs and len(pairs) % 2:
        yield f"--eval-prompt-data: expected pairs NAME PATH, found {len(pairs)} words: {' '.join(pairs)}"
    elif pairs and (bad := [name for name in pairs[::2] if not re.fullmatch(r"[\w.-]+", name)]):
        yield (
            f"--eval-prompt-data: expected names of letters, digits, '.', '_' and '-', found {', '.join(bad)}: metrics "
            "and files are named after them; rename the set"
        )
    elif pairs and len(set(pairs[::2])) != len(pairs) // 2:
        yield f"--eval-prompt-data: expected a different name for each set, found {', '.join(pairs[::2])}"


def _secrets(args: AllFlags) -> Iterator[str]:
    for path in _secret_paths(args.custom_config, ""):
        yield f"{path}: secrets do not belong in configuration files; use the environment"
    for path in _masked_paths({**args.custom_config, "search_url": args.search_url}, ""):
        yield f"{path}: expected its value, found {MASK}, which stands for a secret in files of a run; put it in"


def _secret_paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            plain = isinstance(inner, str) and inner not in ("", MASK) and not inner.startswith("env:")
            if is_secret(key) and plain:
                yield f"{path}{key}"  # `env:` only names a variable
            else:
                yield from _secret_paths(inner, f"{path}{key}.")


def _masked_paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _masked_paths(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _masked_paths(inner, path)
    elif isinstance(value, str) and (value == MASK or f"://{MASK}@" in value or f"={MASK}" in value):
        yield path
