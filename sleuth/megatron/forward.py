"""Runs micro-batches through the model, forward and backward, in any parallel layout.

The loss of a step is a sum over its tokens (see `sleuth.algo.optimizer_steps`), so the gradient is a plain sum
over micro-batches and over data- and context-parallel ranks. Megatron's own divisions are therefore switched off, by
`calculate_per_token_loss` and a finalisation without a token count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from sleuth.algo.context_parallel import zigzag_index
from sleuth.algo.optimizer_steps import OptimizerStepBatch, PackedBatch, pack
from sleuth.megatron import device, parallel
from sleuth.megatron.attention import PackedRow
from sleuth.megatron.logprobs import HeadOptions
from sleuth.sample import TrainSample

Metrics = dict[str, Tensor]
Objective = Callable[["MicroBatch", Tensor], tuple[Tensor, Metrics]]
"""(micro-batch, token statistics [n, 3]) -> (loss to add, sums to add up as metrics)."""


@dataclass(slots=True)
class MicroBatch:
    """One packed row, and the trained tokens in this rank's part of it.

    `index` [t] holds the positions in the row that belong to this context-parallel rank. `selected` [n] holds the
    indices into these t positions at which a token has a weight in the loss; all other tensors [n] are about the
    selected tokens.
    """

    samples: Sequence[TrainSample]
    packed: PackedBatch
    local: PackedBatch
    index: Tensor
    selected: Tensor
    weights: Tensor
    """[n] The weight of each selected token in the loss of the optimizer step."""
    policy_weights: Tensor
    """[n] The weight of each token's policy loss: `weights` times the factor of an importance-sampling hook."""
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None

    @classmethod
    def build(
        cls, samples: Sequence[TrainSample], step: OptimizerStepBatch, *, multiple: int, per_token: bool
    ) -> MicroBatch:
        """Pack `samples`, take this rank's part, and move it to the device."""
        where = device.local_device()
        packed = pack(samples, pad_multiple=multiple)
        size, rank = (
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_context_parallel_rank(),
        )
        index = zigzag_index(packed.lengths, size, rank)
        weights = step.token_weights(packed, per_token=per_token)[index]
        selected = weights.nonzero().squeeze(1)
        weights = weights[selected].to(where)
        return cls(samples, packed, packed.slice(index).to(where), index, selected.to(where), weights, weights)

    def of_selected(self, row: Tensor) -> Tensor:
        """From values [t] of this rank's part to those of the selected tokens [n]."""
        return row[self.selected]

    def reselect(self, keep: Tensor, *, weights: Tensor, policy_weights: Tensor) -> None:
        """Keep only the selected tokens for which `keep` [n] is True, with the given weights [n]."""
        self.selected, self.weights, self.policy_weights = self.selected[keep], weights[keep], policy_weights[keep]
        if self.old_log_probs is not None:
            self.old_log_probs = self.old_log_probs[keep]
        if self.ref_log_probs is not None:
            self.ref_log_probs = self.ref_log_probs[keep]

    def whole_row(self, values: Tensor) -> Tensor:
        """From values [n] of selected tokens on all context-parallel ranks to the row [T], 0 elsewhere. Collective."""
        row = values.new_zeros(len(self.local))
        row[self.selected] = values
        return parallel.gather_context(row, self.packed.lengths)

    def packed_row(self) -> PackedRow:
        bounds = self.packed.cu_seqlens.to(device.local_device())
        size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        return PackedRow.of(self.packed.lengths, bounds, size, rank)


def finalize_gradients(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Sum gradients over ranks; leaves out the token count, by which megatron would divide."""
    finalize_model_grads(model, None, **kwargs)


def run_model(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    options: HeadOptions,
    objective: Objective,
    *,
    train: bool,
    one_done: Callable[[], None] = lambda: None,
) -> list[Metrics]:
    """Forward, and backward if `train`, over `batches`; the objective's metrics of each on the last stage, else [].

    `one_done` is called after each forward pass of this rank's first part of the model.
    """
    rows = _fill_up(batches) if len(chunks) > 1 else batches

    def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(iterator)
        output = model(
            batch.local.input_ids[None],
            batch.local.position_ids[None],
            packed_seq_params=batch.packed_row(),
            selected=batch.selected,
            targets=batch.of_selected(batch.local.targets),
            options=options,
        )
        if model is chunks[0]:
            one_done()

        def loss(statistics: Tensor) -> tuple[Tensor, Tensor, Metrics]:
            value, metrics = objective(batch, statistics)
            return value, torch.zeros((), dtype=torch.int, device=value.device), metrics

        return output, loss

    results: list[Metrics] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(rows) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(rows),
        seq_length=max(len(row.local) for row in rows),
        micro_batch_size=1,
        forward_only=not train,
    )
    return results[: len(batches)]


def _fill_up(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """`batches` and empty ones after them, to a multiple of the pipeline's ranks, as an interleaved pipeline needs.

    There are at least twice as many as ranks: with fewer, only some ranks do all forward passes before the first
    backward pass, and ranks that exchange the lengths of rows then wait for each other for ever.
    """
    size = parallel_state.get_pipeline_model_parallel_world_size()
    missing = max(2 * size, -(-len(batches) // size) * size) - len(batches)
    multiple = math.gcd(*(length for batch in batches for length in batch.packed.lengths))
    nothing = OptimizerStepBatch([[]], 1, 1.0)
    empty = (MicroBatch.build([], nothing, multiple=multiple, per_token=True) for _ in range(missing))
    return [*batches, *empty]


def score(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    options: HeadOptions,
    one_done: Callable[[], None] = lambda: None,
) -> list[Tensor | None]:
    """Log-probabilities [n] of each batch's selected tokens, by the current weights; None before the last stage.

    `one_done`: see `run_model`.
    """

    def objective(batch: MicroBatch, statistics: Tensor) -> tuple[Tensor, Metrics]:
        return statistics.new_zeros(()), {"log_probs": statistics[:, 0].clone()}

    with torch.no_grad():
        results = run_model(chunks, batches, options, objective, train=False, one_done=one_done)
    if not parallel.is_last_stage():
        return [None] * len(batches)
    return [result["log_probs"] for result in results]
