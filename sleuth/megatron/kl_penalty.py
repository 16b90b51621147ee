"""The KL penalty in the reward (`--kl-coef`): subtracts the divergence from rewards, then computes advantages.

The reward of sample i becomes r_i - kl_coef * sum over its trained tokens of KL[t], where KL[t] estimates the
divergence (`--kl-penalty-type`) of the policy as it was before the step from the frozen reference; then
`--advantage-estimator` makes advantages of the rewards of the whole step, as it does without a penalty. So the penalty
is normalised with the reward, within its group or over the step, and all tokens of a sample share it.
Only the trainer knows both log-probabilities; so with a penalty, its data come without advantages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from megatron.core import parallel_state
from torch import Tensor

from sleuth.algo.estimators import estimate_advantages
from sleuth.algo.losses import kl_estimate
from sleuth.algo.names import Estimator, KLKind
from sleuth.algo.sequences import sequence_sums
from sleuth.megatron import parallel
from sleuth.megatron.forward import MicroBatch

_REWARD, _TOKENS, _KL = range(3)


class PenaltySettings(Protocol):
    """The arguments on which the penalty and the advantages depend."""

    kl_coef: float
    kl_penalty_type: KLKind
    advantage_estimator: Estimator
    disable_grpo_std_normalization: bool
    n_samples_per_prompt: int


def penalise(args: PenaltySettings, batches: Sequence[MicroBatch], num_samples: int) -> dict[str, float]:
    """Set the advantages of this rank's `batches` of a step with `num_samples` samples; returns metrics.

    The batches must have `old_log_probs` and `ref_log_probs`. Collective over the ranks of the last pipeline stage.
    """
    table = parallel.sum_over_data(_table(args, batches, num_samples))
    penalty = args.kl_coef * table[:, _KL]
    groups = (-1, args.n_samples_per_prompt)
    advantages = estimate_advantages(
        args.advantage_estimator,
        (table[:, _REWARD] - penalty).view(groups),
        table[:, _TOKENS].view(groups),
        normalize_std=not args.disable_grpo_std_normalization,
    ).flatten()
    for batch in batches:
        _set_advantages(batch, advantages.cpu())
    return {"kl_penalty": float(penalty.mean())}


def _table(args: PenaltySettings, batches: Sequence[MicroBatch], num_samples: int) -> Tensor:
    """[num_samples, 3]: reward, trained tokens and KL sum of each sample that this rank holds, 0 for the others."""
    table = torch.zeros(num_samples, 3, dtype=torch.float64, device=batches[0].weights.device)
    for batch in batches:
        if not batch.samples:
            continue
        assert batch.old_log_probs is not None
        assert batch.ref_log_probs is not None
        kl = kl_estimate(batch.old_log_probs, batch.ref_log_probs, args.kl_penalty_type).double()
        places = torch.tensor([sample.index for sample in batch.samples], device=table.device)
        assert int(places.min()) >= 0, "samples carry their place in the step"
        table[places, _KL] = sequence_sums(kl, batch.of_selected(batch.local.sample_ids), len(batch.samples))
        if parallel_state.get_context_parallel_rank() == 0:  # all ranks know these whole, and the divergence in parts
            table[places, _REWARD] = table.new_tensor([sample.reward for sample in batch.samples])
            table[places, _TOKENS] = table.new_tensor([sum(sample.loss_mask) for sample in batch.samples])
    return table


def _set_advantages(batch: MicroBatch, advantages: Tensor) -> None:
    """Set the advantage of every response token of the batch from `advantages` [num_samples]."""
    if not batch.samples:
        return
    row = batch.packed.join_responses(
        [torch.full((len(sample.loss_mask),), float(advantages[sample.index])) for sample in batch.samples]
    )
    batch.packed = replace(batch.packed, advantages=row)
    batch.local = replace(batch.local, advantages=row[batch.index].to(batch.weights.device))
