"""Turns scored groups into the data of the trainer's ranks: advantages, optimizer steps, micro-batches."""

from __future__ import annotations

from collections.abc import Collection

import torch

from sleuth.algo.context_parallel import length_multiple
from sleuth.algo.estimators import estimate_advantages
from sleuth.algo.optimizer_steps import OptimizerStepBatch, plan_optimizer_steps
from sleuth.arguments import Args
from sleuth.sample import Sample, TrainSample


def train_samples(args: Args, groups: list[list[Sample]], logged: Collection[int] = ()) -> list[TrainSample]:
    """Every sample of every group as a TrainSample, with its advantage at each response token.

    `logged`: the places, group after group, of the samples whose trajectories are written down.

    With `--kl-coef` the advantages stay empty: the rewards are complete only in the trainer, which computes the
    advantages (`sleuth.megatron.kl_penalty`).
    """
    samples = [sample for group in groups for sample in group]
    if args.kl_coef:
        return [_train_sample(sample, None, index, index in logged) for index, sample in enumerate(samples)]
    advantages = estimate_advantages(
        args.advantage_estimator,
        torch.tensor([[sample.reward for sample in group] for group in groups], dtype=torch.float64),
        torch.tensor([[sum(sample.trace.loss_mask) for sample in group] for group in groups], dtype=torch.float64),
        normalize_std=not args.disable_grpo_std_normalization,
    )
    return [
        _train_sample(sample, advantage, index, index in logged)
        for index, (sample, advantage) in enumerate(zip(samples, advantages.flatten().tolist(), strict=True))
    ]


def _train_sample(sample: Sample, advantage: float | None, index: int, logged: bool) -> TrainSample:
    trace = sample.trace
    assert sample.reward is not None, "what is trained on was scored"
    return TrainSample(
        token_ids=trace.token_ids,
        prompt_length=len(trace.prompt_ids),
        loss_mask=[float(m) for m in trace.loss_mask],
        rollout_log_probs=list(trace.log_probs),
        advantages=[] if advantage is None else [advantage] * len(trace.response_ids),
        reward=sample.reward,
        index=index,
        logged=logged,
    )


def shard_batch(args: Args, samples: list[TrainSample]) -> list[list[OptimizerStepBatch]]:
    """The data of each data-parallel rank: `[rank][optimizer step]`.

    Samples are cut into optimizer steps of `--global-batch-size`, each step into micro-batches of at
    most `--max-tokens-per-gpu` (times the context-parallel size) or of `--micro-batch-size` samples.
    """
    dynamic = args.use_dynamic_batch_size
    return plan_optimizer_steps(
        samples,
        global_batch_size=args.global_batch_size,
        num_ranks=args.data_parallel_size,
        max_tokens=args.max_tokens_per_gpu * args.context_parallel_size if dynamic else None,
        micro_batch_size=None if dynamic else args.micro_batch_size,
        balance=args.balance_data,
        pad_multiple=length_multiple(args),
    )
