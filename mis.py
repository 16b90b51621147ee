"""Correction for the mismatch between the engine that samples and the trainer that learns (MIS).

    --use-tis --custom-config-path mis.yaml --custom-tis-function-path mis.compute_mis_weights_with_cp

Engine and trainer never give a token quite the same probability: their kernels differ, often their precision, and the
engine's weights may be some steps old. This hook multiplies each token's loss by a weight, or rejects the token, and
measures the mismatch. With d = log p_trainer(token) - log p_engine(token), in nats:

    level    token: the log-ratio of a token is its own d; sequence: the sum of d over its sample; geometric: their mean
    ratio    exp(log-ratio), with the exponent bounded to [-20, 20] (bounds are compared as logarithms, before that)
    weight   tis_mode truncate: min(ratio, upper); clip: into [lower, upper]; mask: the ratio, rejected if out of bounds
    use_rs   rejects tokens whose ratio at rs_level is outside of [rs_lower_bound, rs_upper_bound]
    veto     with use_rs: rejects a sample if exp(d) < rs_veto_threshold at any of its tokens

p_trainer is the probability by the policy before the step's updates, at the rollout temperature. Only tokens whose loss
mask is not 0 take part. All statistics are float64 and over the whole optimizer step: `reduce` completes them over
ranks, so nothing depends on micro-batches or the parallel layout.

Source of the weights: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; of
mode mask, sequence levels and veto: Liu, Li et al. 2025, "When speed kills stability: demystifying RL collapse from the
training-inference mismatch". docs/mismatch.md says which setting helps when, docs/metrics.md lists the metrics.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from sleuth.hooks import Settings
from sleuth.paths import check_writable

logger = logging.getLogger(__name__)

MAX_EXPONENT = 20.0
"""Log-ratios are bounded to [-20, 20] nats before `exp`: a ratio lies between 2e-9 and 4.9e8."""

Level = Literal["token", "sequence", "geometric"]
Sums = dict[str, tuple[float, float]]
"""For each metric the sum of its values and their number, which give its mean; the number is 0 for mere counts."""


class Reduce(Protocol):
    """Completes a tensor of this rank's sums (or maxima) over all ranks that hold other samples."""

    def __call__(self, values: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor: ...


# Settings


class MisSettings(Settings, section="mis", flat=True, flags={"use_tis": "use_tis"}):
    """The keys of mis.yaml, at its top level or under `mis:`; `use_tis` is the flag --use-tis."""

    model_config = ConfigDict(allow_inf_nan=True)

    use_tis: bool = False
    """Weight tokens by the ratio of probabilities."""
    tis_level: Level = "token"
    """token: the token's own ratio; sequence: the product over its sample; geometric: the geometric mean over it."""
    tis_mode: Literal["truncate", "mask", "clip"] = "truncate"
    """truncate: bounded from above; clip: bounded from both sides; mask: tokens outside of the bounds are rejected."""
    tis_lower_bound: float | None = Field(None, ge=0.0)
    """None: 1 / `tis_upper_bound`. Mode truncate ignores it."""
    tis_upper_bound: float = Field(2.0, gt=0.0)
    tis_batch_normalize: bool = False
    """Divide the weights by their mean over the optimizer step."""
    use_rs: bool = False
    """Reject tokens whose ratio is out of bounds, whatever the weights are."""
    rs_level: Level = "token"
    """As `tis_level`; at sequence and geometric a sample is rejected as a whole or not at all."""
    rs_lower_bound: float | None = Field(None, ge=0.0)
    """None: the lower bound of the weights (`tis_lower_bound`)."""
    rs_upper_bound: float | None = Field(None, gt=0.0)
    """None: the upper bound of the weights (`tis_upper_bound`)."""
    rs_veto_threshold: float | None = Field(1e-4, gt=0.0, lt=1.0)
    """With `use_rs`: a sample with a token whose ratio is below this is rejected. None: no veto."""
    mis_nonfinite: Literal["mask", "stop"] = "mask"
    """What a NaN or infinite log-probability of a trainable token does: mask rejects its sample, stop ends the run."""
    mis_dump_dir: Path | None = Field(None, strict=False)
    """A folder for .npz files, one per optimizer step, with both log-probabilities of every trainable token."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.use_tis or self.use_rs):
            raise ValueError(
                "expected use_tis (or --use-tis) or use_rs, found neither; without them nothing is corrected"
            )
        for name, (lower, upper) in (("tis", self.tis_bounds), ("rs", self.rs_bounds)):
            if not lower <= 1.0 <= upper or lower == upper:
                raise ValueError(
                    f"expected {name}_lower_bound <= 1 <= {name}_upper_bound and not both 1, found {lower:g} and "
                    f"{upper:g}; a ratio of 1 is a token on which engine and trainer agree"
                )
        return self

    @property
    def tis_bounds(self) -> tuple[float, float]:
        lower = 1.0 / self.tis_upper_bound if self.tis_lower_bound is None else self.tis_lower_bound
        return lower, self.tis_upper_bound

    @property
    def rs_bounds(self) -> tuple[float, float]:
        lower, upper = self.tis_bounds
        lower = lower if self.rs_lower_bound is None else self.rs_lower_bound
        return lower, upper if self.rs_upper_bound is None else self.rs_upper_bound


def check_args(args: Any) -> None:
    """Raise ValueError for settings that are wrong; called before a run starts anything."""
    folder = MisSettings.of(args).mis_dump_dir
    if folder is not None:
        check_writable(folder, "mis_dump_dir")


def compute_mis_weights_with_cp(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor], dict[str, float]]:
    """The hook: returns `pg_loss` [T] times the weights (0 at rejected tokens), the masks that remain, and metrics.

    T is the sum of `response_lengths`. The trainer calls it once for each optimizer step, with whole samples, whatever
    the context parallelism. `kwargs["reduce"]` completes sums and maxima over data-parallel ranks.
    """
    config = MisSettings.of(args)
    lengths = [len(mask) for mask in loss_masks]
    if lengths != list(response_lengths) or sum(lengths) != pg_loss.numel():
        raise ValueError(
            f"expected whole responses of {list(response_lengths)} tokens, found masks of {lengths} and a loss of "
            f"{pg_loss.numel()} tokens"
        )
    if config.mis_dump_dir is not None:
        _dump(config.mis_dump_dir, train_log_probs, rollout_log_probs, loss_masks)
    weights, masks, metrics = compute_mis_weights(
        config,
        train_log_probs=train_log_probs,
        rollout_log_probs=rollout_log_probs,
        loss_masks=loss_masks,
        reduce=kwargs.get("reduce"),
    )
    factor, kept = _join(weights).to(pg_loss), _join(masks).to(pg_loss.device) != 0
    return torch.where(kept, pg_loss * factor, 0.0), masks, metrics


@torch.no_grad()  # weights are factors without gradient, even if the log-probabilities require one
def compute_mis_weights(
    args: Any,
    *,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    reduce: Reduce | None = None,
) -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
    """Weights and masks of each sample's response tokens, and metrics; `args` is anything that `MisSettings.of` takes.

    Each list has one 1-D tensor for each sample, and the tensors of a sample are equally long. Log-probabilities are in
    nats, of any floating type, and are ignored where the mask is 0. Weights are float32, and 0 where the returned mask
    (of the given type) is 0. `reduce` completes statistics over the ranks that hold other samples; all of them call
    this function.

    Raises ValueError for settings or lengths that do not fit. Raises FloatingPointError if trainable tokens have NaN or
    infinite log-probabilities, either with `mis_nonfinite: stop` or in every sample.
    """
    config = MisSettings.of(args)
    _check_rows("loss_masks", loss_masks, loss_masks)
    _check_rows("train_log_probs", train_log_probs, loss_masks)
    _check_rows("rollout_log_probs", rollout_log_probs, loss_masks)
    tokens = _Tokens.of(train_log_probs, rollout_log_probs, loss_masks)

    weights, kept = torch.ones_like(tokens.log_ratio), torch.ones_like(tokens.log_ratio, dtype=torch.bool)
    sums: Sums = {}
    if config.use_rs:
        kept, sums = _reject(config, tokens)
    if config.use_tis:
        weights, within, more = _weigh(config, tokens)
        kept, sums = kept & within, sums | more
    used = tokens.units(weights, config.tis_level)[tokens.units_with(kept, config.tis_level)]

    maxima = _reduce_maxima(_extremes(tokens, used), reduce)
    sums = _reduce_sums(sums | _statistics(tokens, kept, used, maxima["sample_log_ratio"]), reduce)
    _check_what_is_left(config, sums)
    total, number = sums["weight"]
    norm = total / number if config.tis_batch_normalize and number else 1.0

    new_weights = tokens.to_rows(torch.where(kept, weights / norm, 0.0).float())
    new_masks = [mask * row for mask, row in zip(loss_masks, tokens.to_rows(kept), strict=True)]
    return new_weights, new_masks, _metrics(config, sums, maxima, norm)


def _check_rows(name: str, values: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    for number, value in enumerate(values):
        if not torch.is_tensor(value) or value.dim() != 1:
            found = f"one of shape {list(value.shape)}" if torch.is_tensor(value) else type(value).__name__
            raise ValueError(
                f"expected {name} as a list of 1-D tensors, one a sample, found {found} at {number}; give each "
                "sample's row for itself"
            )
    lengths, found_lengths = [len(mask) for mask in masks], [len(value) for value in values]
    if found_lengths != lengths:
        raise ValueError(f"expected {name} as long as loss_masks, {lengths}, found {found_lengths}")


def _join(rows: Sequence[Tensor]) -> Tensor:
    """One row [T] of all samples; it is empty if there are none."""
    return torch.cat(list(rows)) if len(rows) else torch.zeros(0)


def _sample_numbers(rows: Sequence[Tensor]) -> Tensor:
    """The number of each token's sample, from 0: [T]."""
    return torch.repeat_interleave(torch.tensor([len(row) for row in rows], dtype=torch.long))


# Tokens and samples


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The N trainable tokens of the n samples that have any, sample after sample; values are float64.

    Samples with a NaN or infinite log-probability at a trainable token are left out, and only counted.

    lengths: of the responses of all samples. place: [N] index of the token in the row of all response tokens. sample:
    [N] number of the token's sample, 0 to n - 1. counts: [n] tokens of each sample. log_ratio: [N] trainer's minus
    engine's log-probability. train, rollout: [n] sums of a sample's log-probabilities. nonfinite: how many tokens were
    NaN or infinite, and in how many samples.

    Each *unit* gets one weight: a token at level token, else a sample.
    """

    lengths: list[int]
    place: Tensor
    sample: Tensor
    counts: Tensor
    log_ratio: Tensor
    train: Tensor
    rollout: Tensor
    nonfinite: tuple[int, int]

    @classmethod
    def of(cls, train_rows: Sequence[Tensor], rollout_rows: Sequence[Tensor], masks: Sequence[Tensor]) -> Self:
        place = (_join(masks) != 0).nonzero().squeeze(1)
        sample = _sample_numbers(masks).to(place.device)[place]
        train, rollout = _join(train_rows)[place].double(), _join(rollout_rows)[place].double()
        bad = ~(train - rollout).isfinite()  # true where either is NaN or infinite
        bad_samples = sample[bad].unique()
        if len(bad_samples):
            good = ~torch.isin(sample, bad_samples)
            place, sample, train, rollout = place[good], sample[good], train[good], rollout[good]
        _, sample, counts = torch.unique_consecutive(sample, return_inverse=True, return_counts=True)
        return cls(
            lengths=[len(mask) for mask in masks],
            place=place,
            sample=sample,
            counts=counts,
            log_ratio=train - rollout,
            train=_per_sample(train, counts),
            rollout=_per_sample(rollout, counts),
            nonfinite=(int(bad.sum()), len(bad_samples)),
        )

    @property
    def sample_log_ratio(self) -> Tensor:
        """The log-ratio of each sample, which is the sum over its tokens: [n]."""
        return self.train - self.rollout

    def log_ratio_at(self, level: Level) -> Tensor:
        """The log-ratio of each token at a level: [N]. Except at level token, all tokens of a sample have the same."""
        if level == "token":
            return self.log_ratio
        ratio = self.sample_log_ratio
        return (ratio if level == "sequence" else ratio / self.counts)[self.sample]

    def units(self, values: Tensor, level: Level) -> Tensor:
        """From values [N] that are equal within a unit to one value for each unit: [N] or [n]."""
        return values if level == "token" else values[self.counts.cumsum(0) - self.counts]

    def units_with(self, tokens: Tensor, level: Level) -> Tensor:
        """Which units have at least one of `tokens` (bool [N]): bool [N] or [n]."""
        return tokens if level == "token" else _per_sample(tokens.double(), self.counts) > 0

    def to_rows(self, values: Tensor) -> list[Tensor]:
        """From values [N] to a row for each sample's response tokens, 0 (or False) at tokens not among the N."""
        return list(values.new_zeros(sum(self.lengths)).scatter_(0, self.place, values).split(self.lengths))


def _per_sample(values: Tensor, counts: Tensor) -> Tensor:
    """Sums [n] of values [N] over samples of `counts` [n] tokens; deterministic, also on GPUs."""
    # unsafe skips the check of the counts, which fails if there are none.
    return torch.segment_reduce(values, "sum", lengths=counts, unsafe=True)


# Weights and rejection


def _weigh(config: MisSettings, tokens: _Tokens) -> tuple[Tensor, Tensor, Sums]:
    """Bounded weights [N], which tokens [N] are kept (all except in mode mask), and metrics."""
    level, mode, (lower, upper) = config.tis_level, config.tis_mode, config.tis_bounds
    log_ratio = tokens.log_ratio_at(level)
    low, high = log_ratio < _log(lower), log_ratio > _log(upper)
    ratio = _exp(log_ratio)
    weights, within = ratio.clamp(0.0 if mode == "truncate" else lower, upper), torch.ones_like(high)
    before, after = tokens.units(ratio, level), tokens.units(weights, level)
    if mode == "mask":
        within = ~(low | high)
        after = after[tokens.units(within, level)]
    sums = {"tis_weight_before_bound": _total(before), "tis_weight_after_bound": _total(after)}
    if mode == "truncate":
        return weights, within, sums | {"tis_truncate_fraction": _total(high)}
    return weights, within, sums | {f"tis_{mode}_fraction_low": _total(low), f"tis_{mode}_fraction_high": _total(high)}


def _reject(config: MisSettings, tokens: _Tokens) -> tuple[Tensor, Sums]:
    """Apply the rejection settings `rs_*`: returns which tokens [N] are kept, and metrics."""
    log_ratio, (lower, upper) = tokens.log_ratio_at(config.rs_level), config.rs_bounds
    low, high = log_ratio < _log(lower), log_ratio > _log(upper)
    kept, sums = ~(low | high), {"rs_mask_fraction_low": _total(low), "rs_mask_fraction_high": _total(high)}
    if config.rs_veto_threshold is not None:
        impossible = tokens.log_ratio < _log(config.rs_veto_threshold)
        vetoed = tokens.units_with(impossible, "sequence")
        kept = kept & ~vetoed[tokens.sample]
        sums |= {"veto_token_fraction": _total(impossible), "veto_sample_fraction": _total(vetoed)}
    return kept, sums


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


# Metrics


def _extremes(tokens: _Tokens, used: Tensor) -> dict[str, Tensor]:
    """Values whose maxima over all ranks are logged or needed."""
    log_ratio = tokens.sample_log_ratio
    per_token = (log_ratio / tokens.counts).abs()
    return {"sample_log_ratio": log_ratio, "log_ppl_diff": per_token, "weight": used, "minus_weight": -used}


def _statistics(tokens: _Tokens, kept: Tensor, used: Tensor, largest: float) -> Sums:
    """The sums for the metrics that are logged whatever the settings.

    kept: [N] whether a token is kept. used: weights of the units that keep a token. largest: the largest
    `sample_log_ratio` on all ranks.
    """
    bounded = tokens.log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    excess = bounded.expm1()  # ratio - 1, exact also for the smallest log-ratios
    train_log_ppl, rollout_log_ppl = -tokens.train / tokens.counts, -tokens.rollout / tokens.counts
    difference = train_log_ppl - rollout_log_ppl
    return {
        "train_log_ppl": _total(train_log_ppl),
        "rollout_log_ppl": _total(rollout_log_ppl),
        "train_ppl": _total(_exp(train_log_ppl)),
        "rollout_ppl": _total(_exp(rollout_log_ppl)),
        "log_ppl_diff": _total(difference),
        "log_ppl_abs_diff": _total(difference.abs()),
        "kl": _total(-tokens.log_ratio),
        "k3": _total(excess - bounded),
        "square_ratio": _total((excess + 1.0).square()),
        "square_sample_ratio": _total((2.0 * (tokens.sample_log_ratio - largest)).exp()),
        "rejected_token_fraction": _total(~kept),
        "rejected_sample_fraction": _total(~tokens.units_with(kept, "sequence")),
        "weight": _total(used),
        "square_weight": _total(used.square()),
        "nonfinite_tokens": (tokens.nonfinite[0], 0),
        "nonfinite_samples": (tokens.nonfinite[1], 0),
    }


def _metrics(config: MisSettings, sums: Sums, maxima: Mapping[str, float], norm: float) -> dict[str, float]:
    """The metrics of the step from sums and maxima over all ranks: means, and values derived from them."""
    metrics = {name: total / max(number, 1.0) for name, (total, number) in sums.items()}
    weight, square_weight = metrics.pop("weight"), metrics.pop("square_weight")
    chi2_token = math.log(metrics.pop("square_ratio") or 1.0)
    chi2_sequence = math.log(metrics.pop("square_sample_ratio") or 1.0) + 2.0 * maxima["sample_log_ratio"]
    metrics |= {
        "log_ppl_diff_max": maxima["log_ppl_diff"],
        "log_chi2_token": chi2_token,
        "log_chi2_sequence": chi2_sequence,
        "chi2_token": math.expm1(min(chi2_token, MAX_EXPONENT)),
        "chi2_sequence": math.expm1(min(chi2_sequence, MAX_EXPONENT)),
    }
    if config.use_tis:
        metrics |= {
            "tis_weight_mean": weight / norm,
            "tis_weight_min": -maxima["minus_weight"] / norm,
            "tis_weight_max": maxima["weight"] / norm,
            "effective_sample_size": weight**2 / (square_weight or 1.0),
        }
    if config.tis_batch_normalize:
        metrics["tis_batch_norm"] = norm
    return {f"mis/{name}": value for name, value in metrics.items()}


def _check_what_is_left(config: MisSettings, sums: Sums) -> None:
    """Warn of rejected samples, or raise. Called after the reduction, so that all ranks stop together."""
    bad, samples = int(sums["nonfinite_tokens"][0]), int(sums["nonfinite_samples"][0])
    rejected, present = sums["rejected_sample_fraction"]
    if present and rejected == present:
        logger.warning(
            "every sample of this optimizer step is rejected, so nothing is learned from it; widen the bounds"
        )
    if not bad:
        return
    found = f"{bad} trainable tokens of {samples} samples have a log-probability that is NaN or infinite"
    if not present:
        raise FloatingPointError(f"{found}, and there is no other sample in this optimizer step: the model is broken")
    if config.mis_nonfinite == "stop":
        raise FloatingPointError(f"{found}, in trainer or engine; mis_nonfinite: mask rejects such samples and goes on")
    logger.warning("%s; they are rejected (mis_nonfinite: mask)", found)


def _total(values: Tensor) -> tuple[float, float]:
    """The sum and the number of values; the sum of booleans is how many are True."""
    return float(values.sum(dtype=torch.float64)), values.numel()


def _reduce_sums(sums: Sums, reduce: Reduce | None) -> Sums:
    table = torch.tensor(list(sums.values()), dtype=torch.float64)
    completed = table if reduce is None else reduce(table, op="sum")
    return {name: (total, number) for name, (total, number) in zip(sums, completed.tolist(), strict=True)}


def _reduce_maxima(rows: Mapping[str, Tensor], reduce: Reduce | None) -> dict[str, float]:
    """The largest value of each row over all ranks; 0 if no rank has a value."""
    largest = torch.tensor([float(row.max()) if len(row) else -math.inf for row in rows.values()], dtype=torch.float64)
    completed = largest if reduce is None else reduce(largest, op="max")
    return {name: value if value > -math.inf else 0.0 for name, value in zip(rows, completed.tolist(), strict=True)}


@torch.no_grad()
def _dump(folder: Path, train: Sequence[Tensor], rollout: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Write `train` and `rollout` [N] of the trainable tokens and `sample` [N], the number of each token's sample."""
    on = (_join(masks) != 0).cpu()
    sample = _sample_numbers(masks)[on].numpy()
    train_row, rollout_row = (_join(rows).cpu()[on].float().numpy() for rows in (train, rollout))
    folder.mkdir(parents=True, exist_ok=True)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    number = len(list(folder.glob(f"rank{rank:03d}_*.npz")))
    np.savez(folder / f"rank{rank:03d}_{number:06d}.npz", train=train_row, rollout=rollout_row, sample=sample)
