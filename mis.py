"""Importance sampling between engine and trainer: the mismatch correction (MIS) of rollouts.

The engine that sampled a token and the trainer that learns from it never compute quite the same probability: other
kernels, another precision, weights that are some steps old. This hook weights each token by

    trainer's probability of it / engine's probability of it

within bounds, or rejects what is too far off, and measures the mismatch:

    --use-tis --custom-config-path mis.yaml --custom-tis-function-path mis.compute_mis_weights_with_cp

`mis.yaml` holds the settings, docs/mismatch.md says which to choose, docs/metrics.md lists the metrics.
`compute_mis_weights` needs nothing but tensors. The trainer's log-probabilities are those of the policy before the
step's updates, at the rollout temperature. All statistics are over the optimizer step: what is summed here is completed
by `reduce`, so that nothing depends on micro-batches or ranks. Log weights are bounded to [-20, 20] nats before `exp`.
Source of the weights: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; of
masks, sequence levels and veto: Liu, Li et al. 2025, "When speed kills stability: demystifying RL collapse from the
training-inference mismatch".
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from sleuth.mismatch import MAX_EXPONENT, Level, TrainableTokens, bound_exponent, join

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 32768
"""Response tokens that are corrected at a time, whole samples; it changes nothing but the speed."""


class Reduce(Protocol):
    """Completes a tensor of this rank's sums (or maxima) over all ranks that hold other samples."""

    def __call__(self, values: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor: ...


class MisConfig(BaseModel):
    """The keys of mis.yaml; `use_tis` is the flag --use-tis. Wrong or contradictory ones are a ValueError."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True)

    use_tis: bool = False
    """Weight tokens by the ratio of probabilities."""
    tis_level: Level = "token"
    """token: the token's own ratio; sequence: the product over its sample; geometric: the geometric mean over it."""
    tis_mode: Literal["truncate", "mask", "clip"] = "truncate"
    """truncate: at most the upper bound; clip: within both bounds; mask: what is outside of them is rejected."""
    tis_lower_bound: float | None = Field(None, ge=0.0)
    """None: 1 / `tis_upper_bound`. Mode truncate has no use for it."""
    tis_upper_bound: float = Field(2.0, gt=0.0)
    tis_batch_normalize: bool = False
    """Divide the weights by their mean over the optimizer step."""
    use_rs: bool = False
    """Reject tokens whose ratio is out of bounds, whatever the weights are."""
    rs_level: Level = "token"
    """As `tis_level`; at sequence and geometric all of a sample is rejected or nothing."""
    rs_lower_bound: float | None = Field(None, ge=0.0)
    """None: that of tis."""
    rs_upper_bound: float | None = Field(None, gt=0.0)
    """None: that of tis."""
    rs_veto_threshold: float | None = Field(1e-4, gt=0.0, lt=1.0)
    """With `use_rs`: a sample with a token whose ratio is below this is rejected. None: no veto."""
    mis_nonfinite: Literal["mask", "stop"] = "mask"
    """A trainable token with a NaN or infinite log-probability: reject its sample, or stop the step."""
    mis_dump_dir: Path | None = None
    """Write both log-probabilities of every trainable token to .npz files in this folder, one an optimizer step."""

    @classmethod
    def of(cls, args: Any) -> Self:
        """From a run's arguments (`custom_config`, `use_tis`), a mapping, or any object with these as attributes."""
        if isinstance(args, cls):
            return args
        values = dict(args) if isinstance(args, Mapping) else cls._attributes(args)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ValueError("mis.yaml: " + "; ".join(map(_sentence, error.errors()))) from None

    @classmethod
    def _attributes(cls, args: Any) -> dict[str, Any]:
        values = {name: getattr(args, name) for name in cls.model_fields if hasattr(args, name)}
        custom = getattr(args, "custom_config", {})
        return values | {name: custom[name] for name in cls.model_fields if name in custom}

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


def _sentence(error: Any) -> str:
    name = ".".join(map(str, error["loc"]))
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return f"{name}: {message}, found {error['input']!r}" if name else message


def check_args(args: Any) -> None:
    """Raise ValueError for settings that are wrong; called before a run starts anything."""
    folder = MisConfig.of(args).mis_dump_dir
    if folder is None:
        return
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"mis_dump_dir: expected a folder that can be written, found {existing}; choose another")


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
    """The hook: `pg_loss` [T] times the weights (0 at rejected tokens), the masks that are left, and the metrics.

    T is the sum of `response_lengths`. The trainer gathers whole samples whatever its context parallelism, and calls
    this once an optimizer step. `kwargs["reduce"]` completes sums and maxima over data-parallel ranks.
    """
    config = MisConfig.of(args)
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
    factor, kept = join(weights).to(pg_loss), join(masks).to(pg_loss.device) != 0
    return torch.where(kept, pg_loss * factor, 0.0), masks, metrics


@torch.no_grad()  # weights are factors: no gradient goes through them, whatever the log-probabilities require
def compute_mis_weights(
    args: Any,
    *,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    reduce: Reduce | None = None,
) -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
    """Weights and masks of each sample's response tokens, and metrics; `args` as `MisConfig.of` takes them.

    All lists have one 1-D tensor a sample, equally long within a sample; log-probabilities in nats, of any
    floating type; what stands where a mask is 0 does not matter. Weights are float32, 0 where the returned mask (of the
    given type) is 0. `reduce` completes statistics over ranks that hold other samples, all of which call this.

    Raises ValueError for settings or lengths that do not fit, FloatingPointError for log-probabilities that are NaN or
    infinite at trainable tokens with `mis_nonfinite: stop`, or in every sample.
    """
    config = MisConfig.of(args)
    for name, values in (
        ("loss_masks", loss_masks),
        ("train_log_probs", train_log_probs),
        ("rollout_log_probs", rollout_log_probs),
    ):
        _check_rows(name, values)
    lengths = [len(mask) for mask in loss_masks]
    for name, values in (("train_log_probs", train_log_probs), ("rollout_log_probs", rollout_log_probs)):
        if [len(value) for value in values] != lengths:
            raise ValueError(f"expected {name} as long as loss_masks, {lengths}, found {[len(v) for v in values]}")
    parts = [
        _correct(config, train_log_probs[block], rollout_log_probs[block], loss_masks[block], lengths[block])
        for block in _blocks(lengths)
    ]
    samples = torch.cat([part.samples for part in parts], dim=1)
    maxima = _reduce(_maxima(parts, samples), "max", reduce)
    totals = _reduce(_totals(parts, samples, maxima["sample_log_ratio"]), "sum", reduce)
    _check_finite(config, totals)
    if totals["samples"] and not totals["kept_samples"]:
        logger.warning(
            "every sample of this optimizer step is rejected, so nothing is learned from it; widen the bounds"
        )
    norm = totals["weights"] / totals["units"] if config.tis_batch_normalize and totals["weights"] else 1.0
    rows = [part.weights if norm == 1.0 else part.weights / norm for part in parts]
    weights = [w for row, block in zip(rows, _blocks(lengths), strict=True) for w in row.split(lengths[block])]
    return weights, [mask for part in parts for mask in part.masks], _metrics(config, totals, maxima, norm)


def _check_rows(name: str, values: Sequence[Tensor]) -> None:
    for number, value in enumerate(values):
        if not torch.is_tensor(value) or value.dim() != 1:
            found = f"one of shape {list(value.shape)}" if torch.is_tensor(value) else type(value).__name__
            raise ValueError(
                f"expected {name} as a list of 1-D tensors, one a sample, found {found} at {number}; give each "
                "sample's row for itself"
            )


def _blocks(lengths: Sequence[int]) -> Iterator[slice]:
    """The samples, some at a time: a CPU is quickest where what it computes with stays in its cache."""
    start = size = 0
    for number, length in enumerate(lengths):
        if size and size + length > BLOCK_TOKENS:
            yield slice(start, number)
            start, size = number, 0
        size += length
    yield slice(start, len(lengths))  # one at least, also of no samples


@dataclass(frozen=True, slots=True)
class _Part:
    """What became of a block of n samples: the weights [T] of all their response tokens, in one row, and their masks.

    samples: [4, n], see below. sums: over trainable tokens and over the units of the level, by name.
    smallest, largest: weight of a unit that keeps a token; infinities where none does.
    """

    weights: Tensor
    masks: list[Tensor]
    samples: Tensor
    sums: dict[str, float]
    smallest: float
    largest: float


_COUNT, _KEPT, _TRAIN, _ROLLOUT = range(4)
"""Rows of `_Part.samples`: trainable tokens, those kept of them, and both sums of log-probabilities over the former."""


def _correct(
    config: MisConfig,
    train: Sequence[Tensor],
    rollout: Sequence[Tensor],
    masks: Sequence[Tensor],
    lengths: Sequence[int],
) -> _Part:
    tokens, level = TrainableTokens.pack(train, rollout, masks, lengths), config.tis_level
    sums, kept = _mismatch(tokens), None
    if config.use_rs:
        kept, more = _reject(config, tokens)
        sums |= more
    weights = torch.ones_like(tokens.units(level))
    if config.use_tis:
        weights, within, more = _bound(config, tokens)
        sums |= more
        if within is not None:
            within = tokens.spread(within, level)
            kept = within if kept is None else kept & within
    numbers = None if kept is None else kept.double()
    sample_kept = tokens.counts.double() if numbers is None else tokens.per_sample(numbers)
    if level != "token":
        weights = weights * (sample_kept > 0)  # finite, so this selects
    elif numbers is not None:
        weights = weights * numbers
    units = float(sample_kept.sum() if level == "token" else (sample_kept > 0).sum())
    sums |= {"units": units, "weights": float(weights.sum()), "square_weights": float(torch.dot(weights, weights))}
    per_token = tokens.spread(weights, level)
    if level != "token" and numbers is not None:
        per_token = per_token * numbers
    smallest, largest = math.inf, -math.inf
    if units:
        smallest, largest = map(float, (weights if units == len(weights) else weights[weights > 0]).aminmax())
    return _Part(
        tokens.to_row(per_token.float()),
        list(masks) if kept is None and not tokens.nonfinite[0] else tokens.new_masks(kept, masks),
        torch.stack([tokens.counts.double(), sample_kept, tokens.train, tokens.rollout]),
        sums,
        smallest,
        largest,
    )


def _mismatch(tokens: TrainableTokens) -> dict[str, float]:
    """What is summed over tokens, whatever becomes of them."""
    bounded, excess = tokens.bounded, tokens.excess
    return {
        "kl": -float(tokens.log_ratio.sum()),
        "k3": float((excess - bounded).sum()),
        "square_ratios": float(torch.dot(excess, excess) + 2.0 * excess.sum()) + len(excess),
        "nonfinite_tokens": float(tokens.nonfinite[0]),
        "nonfinite_samples": float(tokens.nonfinite[1]),
    }


def _bound(config: MisConfig, tokens: TrainableTokens) -> tuple[Tensor, Tensor | None, dict[str, float]]:
    """The units' weights within the bounds, which units mode mask leaves (None: all), and counts."""
    level, mode, (lower, upper) = config.tis_level, config.tis_mode, config.tis_bounds
    log_weights = tokens.units(level)
    weights = tokens.excess + 1.0 if level == "token" else bound_exponent(log_weights).exp()
    outside = {"high": log_weights > _log(upper)}
    if mode != "truncate":
        outside["low"] = log_weights < _log(lower)
    # Samples without a token have a log-ratio of 0, so a weight of exactly 1, which is always within bounds.
    absent = 0 if level == "token" else int((tokens.counts == 0).sum())
    sums = {"before": float(weights.sum()) - absent, "present": float(len(weights) - absent)}
    within = None
    if mode == "mask":
        within = ~(outside["low"] | outside["high"])
        after, bounded = float(torch.dot(weights, within.double())), int(within.sum())
    else:
        weights = weights.clamp(lower if mode == "clip" else 0.0, upper)
        after, bounded = float(weights.sum()), len(weights)
    sums |= {"after": after - absent, "bounded": float(bounded - absent)}
    for side, units in outside.items():
        name = "tis_truncate_fraction" if mode == "truncate" else f"tis_{mode}_fraction_{side}"
        sums[name] = tokens.count(units, level)
    return weights, within, sums


def _reject(config: MisConfig, tokens: TrainableTokens) -> tuple[Tensor, dict[str, float]]:
    """Rejection by `rs_*`: which tokens [N] are kept, and counts."""
    level, (lower, upper) = config.rs_level, config.rs_bounds
    units = tokens.units(level)
    low, high = units < _log(lower), units > _log(upper)
    sums: dict[str, float] = {
        "rs_mask_fraction_low": tokens.count(low, level),
        "rs_mask_fraction_high": tokens.count(high, level),
    }
    kept = tokens.spread(~(low | high), level)
    if config.rs_veto_threshold is not None:
        catastrophic = tokens.log_ratio < math.log(config.rs_veto_threshold)
        vetoed = tokens.per_sample(catastrophic.double()) > 0
        sums |= {"veto_token_fraction": int(catastrophic.sum()), "veto_sample_fraction": int(vetoed.sum())}
        kept = kept & ~tokens.spread(vetoed, "sequence")
    return kept, sums


def _maxima(parts: Sequence[_Part], samples: Tensor) -> dict[str, float]:
    """What is largest on this rank; minus infinity where there is nothing."""
    present = samples[:, samples[_COUNT] > 0]
    log_ratio = present[_TRAIN] - present[_ROLLOUT]
    some = log_ratio.numel() > 0
    return {
        "sample_log_ratio": float(log_ratio.max()) if some else -math.inf,
        "log_ppl_diff": float((log_ratio / present[_COUNT]).abs().max()) if some else -math.inf,
        "weight": max(part.largest for part in parts),
        "minus_weight": max(-part.smallest for part in parts),
    }


def _totals(parts: Sequence[_Part], samples: Tensor, largest: float) -> dict[str, float]:
    """Sums over this rank's tokens and samples; `largest` is that log-ratio of a sample over all ranks."""
    counts, kept, train, rollout = samples[:, samples[_COUNT] > 0]
    train_log_ppl, rollout_log_ppl = -train / counts, -rollout / counts
    difference = train_log_ppl - rollout_log_ppl
    rows = {
        "tokens": counts,
        "samples": torch.ones_like(counts),
        "kept_tokens": kept,
        "kept_samples": kept > 0,
        "train_log_ppl": train_log_ppl,
        "rollout_log_ppl": rollout_log_ppl,
        "train_ppl": bound_exponent(train_log_ppl).exp(),
        "rollout_ppl": bound_exponent(rollout_log_ppl).exp(),
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "square_sample_ratios": (2.0 * (train - rollout - largest)).exp(),
    }
    sums = {name: sum(part.sums[name] for part in parts) for name in parts[0].sums}
    return sums | {name: float(row.sum()) for name, row in rows.items()}


def _metrics(
    config: MisConfig, totals: Mapping[str, float], maxima: Mapping[str, float], norm: float
) -> dict[str, float]:
    """Those of METRICS that the settings have, from what was completed over ranks."""
    tokens, samples, units = (max(totals[name], 1.0) for name in ("tokens", "samples", "units"))
    chi2_token = _log_mean(totals["square_ratios"], tokens)
    chi2_sequence = _log_mean(totals["square_sample_ratios"], samples)
    if totals["samples"]:
        chi2_sequence += 2.0 * maxima["sample_log_ratio"]
    of_samples = ("train_log_ppl", "rollout_log_ppl", "train_ppl", "rollout_ppl", "log_ppl_diff", "log_ppl_abs_diff")
    metrics = {name: totals[name] / samples for name in of_samples} | {
        "log_ppl_diff_max": max(maxima["log_ppl_diff"], 0.0),
        "kl": totals["kl"] / tokens,
        "k3": totals["k3"] / tokens,
        "log_chi2_token": chi2_token,
        "log_chi2_sequence": chi2_sequence,
        "chi2_token": math.expm1(min(chi2_token, MAX_EXPONENT)),
        "chi2_sequence": math.expm1(min(chi2_sequence, MAX_EXPONENT)),
        "rejected_token_fraction": (totals["tokens"] - totals["kept_tokens"]) / tokens,
        "rejected_sample_fraction": (totals["samples"] - totals["kept_samples"]) / samples,
        "nonfinite_tokens": totals["nonfinite_tokens"],
        "nonfinite_samples": totals["nonfinite_samples"],
    }
    metrics |= {name: totals[name] / tokens for name in totals if name.startswith(("tis_", "rs_", "veto_token"))}
    if "veto_sample_fraction" in totals:
        metrics["veto_sample_fraction"] = totals["veto_sample_fraction"] / samples
    if config.use_tis:
        metrics |= {
            "tis_weight_before_bound": totals["before"] / max(totals["present"], 1.0),
            "tis_weight_after_bound": totals["after"] / max(totals["bounded"], 1.0),
            "tis_weight_mean": totals["weights"] / units / norm,
            "tis_weight_min": max(-maxima["minus_weight"], 0.0) / norm if totals["units"] else 0.0,
            "tis_weight_max": max(maxima["weight"], 0.0) / norm,
            "effective_sample_size": totals["weights"] ** 2 / (units * totals["square_weights"] or 1.0),
        }
    if config.tis_batch_normalize:
        metrics["tis_batch_norm"] = norm
    return {f"mis/{name}": value for name, value in metrics.items()}


def _check_finite(config: MisConfig, totals: Mapping[str, float]) -> None:
    """After the reduction, so that all ranks stop together."""
    bad, samples = int(totals["nonfinite_tokens"]), int(totals["nonfinite_samples"])
    if not bad:
        return
    found = f"{bad} trainable tokens of {samples} samples have a log-probability that is NaN or infinite"
    if not totals["samples"]:
        raise FloatingPointError(f"{found}, and there is no other sample in this optimizer step: the model is broken")
    if config.mis_nonfinite == "stop":
        raise FloatingPointError(f"{found}, in trainer or engine; mis_nonfinite: mask rejects such samples and goes on")
    logger.warning("%s; they are rejected (mis_nonfinite: mask)", found)


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _log_mean(total: float, count: float) -> float:
    return math.log(total / count) if total > 0 else 0.0


def _reduce(values: Mapping[str, float], op: Literal["sum", "max"], reduce: Reduce | None) -> dict[str, float]:
    if reduce is None:
        return dict(values)
    row = torch.tensor(list(values.values()), dtype=torch.float64)
    return dict(zip(values, reduce(row, op=op).tolist(), strict=True))


def _dump(folder: Path, train: Sequence[Tensor], rollout: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Write `train` and `rollout` [N] of the trainable tokens, and `sample` [N], their sample's number."""
    mask = join(masks) != 0
    sample = torch.repeat_interleave(torch.tensor([len(part) for part in masks]))[mask.cpu()].numpy()
    train_row, rollout_row = (join(part)[mask].float().cpu().numpy() for part in (train, rollout))
    folder.mkdir(parents=True, exist_ok=True)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    number = len(list(folder.glob(f"rank{rank:03d}_*.npz")))
    np.savez(folder / f"rank{rank:03d}_{number:06d}.npz", train=train_row, rollout=rollout_row, sample=sample)
