"""The objectives that training minimises: policy losses (GRPO and its relatives) or supervised cross-entropy.

Every objective returns a loss and metrics that are *sums*: added up over micro-batches and over data- and
context-parallel ranks, they are the loss and the metrics of the whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sleuth.algo.estimators import estimator_loss
from sleuth.algo.losses import kl_estimate, truncated_importance_weights, weighted_sum
from sleuth.algo.names import Estimator, KLKind
from sleuth.algo.sequences import sample_mean_weights
from sleuth.megatron import parallel
from sleuth.megatron.forward import Metrics, MicroBatch, Objective
from sleuth.megatron.logprobs import HeadOptions

_LOG_PROB, _ENTROPY, _MEAN = range(3)


class HeadSettings(Protocol):
    """The arguments that decide which numbers the head computes."""

    @property
    def loss_type(self) -> str: ...

    rollout_temperature: float
    log_probs_chunk_size: int
    label_smoothing: float
    entropy_coef: float


class PolicySettings(Protocol):
    """The arguments that set the terms of a policy loss and their bounds."""

    advantage_estimator: Estimator
    eps_clip: float
    eps_clip_high: float
    eps_clip_c: float | None
    entropy_coef: float
    use_kl_loss: bool
    kl_loss_coef: float
    kl_loss_type: KLKind
    use_tis: bool
    tis_clip: float
    tis_clip_low: float
    custom_tis_function_path: str | None
    context_parallel_size: int


class CorrectionSettings(Protocol):
    """The argument that decides how the masks of an importance-sampling hook are used."""

    rejected_in_denominator: bool
    calculate_per_token_loss: bool


class ObjectiveSettings(HeadSettings, PolicySettings, Protocol):
    """The arguments that `make_objective` reads."""


def head_options(args: HeadSettings) -> HeadOptions:
    """The options of the head for the objective of `args`."""
    if args.loss_type == "sft":
        return HeadOptions(chunk_size=args.log_probs_chunk_size, mean=args.label_smoothing > 0)
    return HeadOptions(
        args.rollout_temperature, args.log_probs_chunk_size, entropy=True, entropy_gradient=args.entropy_coef != 0
    )


def make_objective(args: ObjectiveSettings) -> Objective:
    """The objective named by --loss-type."""
    return _Supervised(args.label_smoothing) if args.loss_type == "sft" else _Policy(args)


class _Supervised:
    """Cross-entropy with label smoothing e: (1 - e) * -log p(y) + e * the mean of -log p over the vocabulary."""

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing

    def __call__(self, batch: MicroBatch, statistics: Tensor) -> tuple[Tensor, Metrics]:
        nll = -statistics[:, _LOG_PROB]
        loss = nll
        if self.smoothing:
            loss = (1.0 - self.smoothing) * nll - self.smoothing * statistics[:, _MEAN]
        total = weighted_sum(loss, batch.weights)
        return total, {
            "loss": total.detach(),
            "nll": weighted_sum(nll.detach(), batch.weights),
            "tokens": _count(batch),
        }


class _Policy:
    """The loss of --advantage-estimator, with KL loss, entropy bonus and importance weights if flags ask for them."""

    def __init__(self, args: PolicySettings) -> None:
        self.args = args

    def __call__(self, batch: MicroBatch, statistics: Tensor) -> tuple[Tensor, Metrics]:
        args, weights = self.args, batch.weights
        train_log_probs, entropy = statistics[:, _LOG_PROB], statistics[:, _ENTROPY]
        if batch.old_log_probs is None:  # the weights have not changed yet in this step
            batch.old_log_probs = train_log_probs.detach()
        old_log_probs = batch.old_log_probs
        rollout_log_probs = batch.of_selected(batch.local.rollout_log_probs)
        policy = estimator_loss(
            args.advantage_estimator,
            train_log_probs,
            old_log_probs=old_log_probs,
            rollout_log_probs=rollout_log_probs,
            advantages=batch.of_selected(batch.local.advantages),
            mask=torch.ones_like(weights),
            sample_ids=batch.of_selected(batch.local.sample_ids),
            num_sequences=batch.packed.num_samples,
            eps_clip=args.eps_clip,
            eps_clip_high=args.eps_clip_high,
            eps_clip_c=args.eps_clip_c,
            reduce=parallel.sum_over_context if args.context_parallel_size > 1 else None,
        )
        metrics = {
            "clip_fraction": weighted_sum(policy.clipped.float(), weights),
            "ratio_mean": weighted_sum(policy.ratio, weights),
            "ppo_kl": weighted_sum(old_log_probs - train_log_probs.detach(), weights),
            "entropy": weighted_sum(entropy.detach(), weights),
            "train_rollout_logprob_abs_diff": weighted_sum((old_log_probs - rollout_log_probs).abs(), weights),
            "tokens": _count(batch),
        }
        per_token = policy.loss
        if args.use_tis and not args.custom_tis_function_path:
            importance = truncated_importance_weights(
                old_log_probs, rollout_log_probs, args.tis_clip_low, args.tis_clip
            )
            per_token = per_token * importance
            metrics["tis_weight_mean"] = weighted_sum(importance, weights)
            bounded = (importance <= args.tis_clip_low) | (importance >= args.tis_clip)
            metrics["tis_clip_fraction"] = weighted_sum(bounded.float(), weights)
        pg_loss = weighted_sum(per_token, batch.policy_weights)
        loss = pg_loss - args.entropy_coef * weighted_sum(entropy, weights)
        metrics["pg_loss"] = pg_loss.detach()
        if batch.ref_log_probs is not None:
            kl = weighted_sum(kl_estimate(train_log_probs, batch.ref_log_probs, args.kl_loss_type), weights)
            loss = loss + args.kl_loss_coef * kl if args.use_kl_loss else loss
            metrics["kl_loss"] = kl.detach()
        return loss, metrics | {"loss": loss.detach()}


def _count(batch: MicroBatch) -> Tensor:
    return batch.weights.new_tensor(float(len(batch.weights)))


class ImportanceSampling:
    """Calls the importance-sampling hook once for each optimizer step, on all samples of a data-parallel rank.

    The hook gets whole samples (whatever the context parallelism) and `pg_loss` = 1 for each response token. The
    `pg_loss` that it returns becomes the factor of each token's policy loss, so a hook must multiply `pg_loss`, not
    add to it. `train_log_probs` are those of the policy before the step's updates, at the rollout temperature, and 0 at
    masked tokens. `reduce(tensor, op="sum" | "max" | "min")` combines a tensor with those of the other data-parallel
    ranks, for statistics over the whole step.

    `path` names the hook; it is given `args` unchanged.

    The masks that the hook returns replace the loss masks in every part of the loss. Tokens that it rejects are left
    out of the denominators, too, as if they had never been trainable; with --rejected-in-denominator they still count
    there. The hook's metrics are numbers, or tensors like `pg_loss`, which are averaged over tokens.
    """

    def __init__(self, args: CorrectionSettings, path: str) -> None:
        from sleuth.hooks import load_hook  # here: hooks need packages that the trainer itself can do without

        self.args = args
        self.hook = load_hook(path, "tis")

    def apply(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Call the hook with the batches' `old_log_probs`, and set their weights by its result; returns its metrics."""
        packed = [batch.packed for batch in batches]
        train = [
            response
            for batch in batches
            for response in batch.packed.split_responses(batch.whole_row(_required(batch.old_log_probs)).cpu())
        ]
        masks = [mask for row in packed for mask in row.split_responses(row.loss_mask)]
        result, new_masks, metrics = self.hook(
            self.args,
            pg_loss=torch.ones(sum(len(mask) for mask in masks)),
            train_log_probs=train,
            rollout_log_probs=[part for row in packed for part in row.split_responses(row.rollout_log_probs)],
            loss_masks=masks,
            total_lengths=[length for row in packed for length in row.total_lengths],
            response_lengths=[length for row in packed for length in row.response_lengths],
            reduce=parallel.reduce_over_samples,
        )
        averaged = self._mean_metrics(metrics, masks)
        factors, new_masks = list(result.split([len(mask) for mask in masks])), [mask.float() for mask in new_masks]
        kept = self._kept_share(masks, new_masks)
        start = 0
        for batch in batches:
            end = start + batch.packed.num_samples
            self._reweight(batch, factors[start:end], new_masks[start:end], kept)
            start = end
        return averaged

    def _kept_share(self, masks: list[Tensor], new_masks: list[Tensor]) -> float:
        """The sum of the new masks divided by that of the old ones, over all data-parallel ranks."""
        sums = torch.tensor([[float(mask.sum()) for mask in part] for part in (masks, new_masks)], dtype=torch.float64)
        old, new = parallel.reduce_over_samples(sums.sum(1)).tolist()
        return new / old if old else 1.0

    def _reweight(self, batch: MicroBatch, factors: list[Tensor], masks: list[Tensor], kept: float) -> None:
        """Give the tokens of a batch the weights of their new masks; tokens without weight are no longer selected."""
        row = batch.packed
        old, new = row.loss_mask, row.join_responses(masks)
        if not self.args.rejected_in_denominator:
            if self.args.calculate_per_token_loss:
                new = new / (kept or 1.0)
            else:
                old, new = row.sample_mean_weights, sample_mean_weights(new, row.sample_ids, row.num_samples)
        scale = torch.where(old > 0, new / old.clamp(min=1e-30), 0.0)
        own = torch.stack([scale, row.join_responses(factors)])[:, batch.index].to(batch.weights.device)
        scale, factor = batch.of_selected(own.t()).unbind(1)
        batch.reselect(scale > 0, weights=batch.weights * scale, policy_weights=batch.weights * scale * factor)

    def _mean_metrics(self, metrics: dict[str, Any], masks: list[Tensor]) -> dict[str, float]:
        """The hook's metrics as means: tensors over all tokens, numbers over all data-parallel ranks."""
        mask = torch.cat(masks)
        sums: dict[str, tuple[float, float]] = {}
        for name, value in metrics.items():
            if torch.is_tensor(value) and value.numel() == len(mask) and value.dim() == 1:
                sums[name] = (float(weighted_sum(value, mask)), float(mask.sum()))
            else:
                sums[name] = (float(value), 1.0)
        if not sums:
            return {}
        totals = parallel.reduce_over_samples(torch.tensor(list(sums.values()), dtype=torch.float64)).tolist()
        return {name: total / count if count else 0.0 for name, (total, count) in zip(sums, totals, strict=True)}


def _required(values: Tensor | None) -> Tensor:
    assert values is not None, "old log-probabilities are computed before the hook is called"
    return values
