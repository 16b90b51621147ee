"""Turns samples into the tensors of a forward pass, and computes the weights of tokens in the loss.

    steps = plan_optimizer_steps(samples, global_batch_size=256, num_ranks=2, max_tokens=9216)   # steps[rank][step]
    packed = pack(steps[0][0].micro_batches[0], pad_multiple=1)
    weights = steps[0][0].token_weights(packed)
    loss = weighted_sum(token_losses, weights)          # summed over micro-batches and ranks: the loss of the step

Loss of an optimizer step = sum over its tokens of weight * token loss. The weights are computed from counts over
the whole step, so the loss depends neither on micro-batches nor on the data- or context-parallel layout. If a
framework averages over ranks, its caller must multiply by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from sleuth.algo.context_parallel import padded_length
from sleuth.algo.packing import plan_micro_batches
from sleuth.algo.sequences import sample_mean_weights

if TYPE_CHECKING:
    from sleuth.sample import TrainSample

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Samples laid end to end in one row of T tokens, each padded at its end.

    Entry t of every tensor [T] is about the prediction of `targets[t]`, the token after `input_ids[t]`. The last real
    token of a sample and its padding have no target: there `targets` and all other tensors are 0, except for
    `position_ids` and `sample_ids`.

    loss_mask: 0 or 1, or any weight >= 0 in supervised training. sample_mean_weights: the loss mask divided by its
    sum over the sample. advantages and rollout_log_probs (nats): 0 where a sample has none. sample_ids: the
    number of the sample in the row, also at its padding.

    The lists have one entry for each sample and describe the full row, even after `slice`: `lengths` count tokens
    with padding, `total_lengths` without it, `response_lengths` only those of the response.
    """

    input_ids: Tensor
    targets: Tensor
    position_ids: Tensor
    sample_ids: Tensor
    loss_mask: Tensor
    sample_mean_weights: Tensor
    advantages: Tensor
    rollout_log_probs: Tensor
    lengths: list[int]
    total_lengths: list[int]
    response_lengths: list[int]

    def __len__(self) -> int:
        """The number of tokens in the row, or in this rank's part of it."""
        return len(self.input_ids)

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @property
    def cu_seqlens(self) -> Tensor:
        """The start of each padded sample in the full row, then the end of the last one: int32 [samples + 1]."""
        ends = torch.tensor([0, *self.lengths]).cumsum(0)
        return ends.to(device=self.input_ids.device, dtype=torch.int32)

    def slice(self, index: Tensor) -> PackedBatch:
        """The part of a context-parallel rank; `index` [T / cp] comes from `zigzag_index(self.lengths, ...)`."""
        index = index.to(self.input_ids.device)
        return self._map(lambda tensor: tensor[index])

    def to(self, device: torch.device | str) -> PackedBatch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def split_responses(self, values: Tensor) -> list[Tensor]:
        """From values [T] of the full row to a list with the values [R] of each sample's response tokens."""
        return [values[begin:end] for begin, end in self._responses()]

    def join_responses(self, values: Sequence[Tensor]) -> Tensor:
        """The reverse of `split_responses`: values [T] of the full row, 0 outside of responses."""
        joined = values[0].new_zeros(sum(self.lengths))
        for (begin, end), value in zip(self._responses(), values, strict=True):
            joined[begin:end] = value
        return joined

    def _responses(self) -> list[tuple[int, int]]:
        spans, offset = [], 0
        for length, total, response in zip(self.lengths, self.total_lengths, self.response_lengths, strict=True):
            end = offset + max(total - 1, 0)
            spans.append((end - response, end))
            offset += length
        return spans

    def _map(self, function: Callable[[Tensor], Tensor]) -> PackedBatch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {name: function(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **changed)


def pack(samples: Sequence[TrainSample], *, pad_multiple: int = 1) -> PackedBatch:
    """Pack samples into one row, each padded to a multiple of `pad_multiple` tokens (see `context_parallel`).

    Without samples the row is one placeholder of padding that has no weight, so that a rank with an
    empty micro-batch still takes part in every collective operation.
    """
    total = [len(sample.token_ids) for sample in samples] or [0]
    responses = [len(sample.loss_mask) for sample in samples] or [0]
    lengths = [padded_length(length, pad_multiple) for length in total]
    counts = torch.tensor(lengths)
    sample_ids = torch.arange(len(lengths)).repeat_interleave(counts)
    starts = (counts.cumsum(0) - counts).tolist()[: len(samples)]

    def row(dtype: torch.dtype, values: Sequence[Sequence[float]], offsets: Sequence[int]) -> Tensor:
        out = torch.zeros(sum(lengths), dtype=dtype)  # id 0 as padding: nothing attends to it, and its weight is 0
        for start, offset, entries in zip(starts, offsets, values, strict=True):
            out[start + offset : start + offset + len(entries)] = torch.tensor(entries, dtype=dtype)
        return out

    ids = [sample.token_ids for sample in samples]
    first, response = [0] * len(ids), [sample.prompt_length - 1 for sample in samples]
    loss_mask = row(torch.float32, [sample.loss_mask for sample in samples], response)
    return PackedBatch(
        input_ids=row(torch.int64, ids, first),
        targets=row(torch.int64, [entries[1:] for entries in ids], first),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        sample_ids=sample_ids,
        loss_mask=loss_mask,
        sample_mean_weights=sample_mean_weights(loss_mask, sample_ids, len(lengths)),
        advantages=row(torch.float32, [sample.advantages for sample in samples], response),
        rollout_log_probs=row(torch.float32, [sample.rollout_log_probs for sample in samples], response),
        lengths=lengths,
        total_lengths=total,
        response_lengths=responses,
    )


@dataclass(frozen=True, slots=True)
class OptimizerStepBatch:
    """One rank's share of one optimizer step, with the counts of the whole step over all ranks.

    `num_samples` counts all samples, even those without a trained token; `num_tokens` is the sum of all loss masks.
    """

    micro_batches: list[list[TrainSample]]
    num_samples: int
    num_tokens: float

    def token_weights(self, packed: PackedBatch, *, per_token: bool = False) -> Tensor:
        """The weights [T] of token losses in the loss of the step; 0 at padding and masked tokens.

        They make the loss the mean over samples of each sample's mean over its tokens or, with `per_token`, the mean
        over all tokens of the step (as in DAPO, arXiv 2503.14476, and always in supervised training).
        """
        if per_token:
            return packed.loss_mask / (self.num_tokens or 1.0)
        return packed.sample_mean_weights / self.num_samples


def split_optimizer_steps(samples: Sequence[T], global_batch_size: int) -> list[list[T]]:
    """Cut a step's samples, in order, into optimizer steps of `global_batch_size` samples each.

    Raises ValueError if the number of samples is not divisible.
    """
    if global_batch_size < 1 or not samples or len(samples) % global_batch_size:
        raise ValueError(
            f"expected a number of samples that divides by --global-batch-size {global_batch_size}, found "
            f"{len(samples)} samples; set --rollout-batch-size x --n-samples-per-prompt to a multiple of it"
        )
    return [list(samples[i : i + global_batch_size]) for i in range(0, len(samples), global_batch_size)]


def plan_optimizer_steps(
    samples: Sequence[TrainSample],
    *,
    global_batch_size: int,
    num_ranks: int,
    max_tokens: int | None = None,
    micro_batch_size: int | None = None,
    balance: bool = True,
    pad_multiple: int = 1,
) -> list[list[OptimizerStepBatch]]:
    """Spread a step's samples over data-parallel ranks; returns `steps[rank][optimizer step]`.

    `max_tokens` is the most tokens of a micro-batch, padding included, over all context-parallel ranks together (so
    --max-tokens-per-gpu times the context-parallel size). `plan_micro_batches` explains the other arguments.
    """
    ranks: list[list[OptimizerStepBatch]] = [[] for _ in range(num_ranks)]
    for step in split_optimizer_steps(samples, global_batch_size):
        plan = plan_micro_batches(
            [padded_length(len(sample.token_ids), pad_multiple) for sample in step],
            num_ranks=num_ranks,
            max_tokens=max_tokens,
            micro_batch_size=micro_batch_size,
            balance=balance,
        )
        num_tokens = float(sum(sum(sample.loss_mask) for sample in step))
        for rank, batches in zip(ranks, plan, strict=True):
            micro_batches = [[step[index] for index in batch] for batch in batches]
            rank.append(OptimizerStepBatch(micro_batches, len(step), num_tokens))
    return ranks
