"""What the mismatch correction costs, beside a plain formulation that goes sample by sample.

    python -m benchmarks.mis [--samples 256] [--shortest 100] [--longest 4000] [--trials 15]

Both compute weights, masks and the same statistics from the same lists of tensors, in one thread: `mis.py` in float64
for all samples at once, the reference in the tensors' own float32 with a few small operations for each sample, as such
a correction is usually written. Milliseconds of one optimizer step, the quarter point of the trials. The last line is
one JSON object; its ratio is reference / ours at token level.

With `--run-dir` of a run that had the hook on, also its share of that run's training time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import whole_number
from mis import MisSettings, compute_mis_weights
from sleuth.metrics.jsonl import read_metrics

Samples = dict[str, list[Tensor]]
VARIANTS: dict[str, dict[str, Any]] = {
    "token": {"use_tis": True},
    "sequence": {"use_tis": True, "tis_level": "sequence"},
    "geometric": {"use_tis": True, "tis_level": "geometric"},
    "token, rejection": {"use_tis": True, "use_rs": True},
    "token, mask": {"use_tis": True, "tis_mode": "mask"},
}


def make_samples(count: int, shortest: int, longest: int) -> Samples:
    """Log-probabilities of responses of `shortest` to `longest` tokens, two thirds of them trainable in runs."""
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=rng).tolist()
    train = [-torch.rand(length, generator=rng) for length in lengths]
    rollout = [values + 0.1 * torch.randn(len(values), generator=rng) for values in train]
    masks = [((torch.arange(length) // 50) % 3 < 2).float() for length in lengths]
    return {"train_log_probs": train, "rollout_log_probs": rollout, "loss_masks": masks}


def per_sample(config: MisSettings, samples: Samples) -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
    """The reference: a loop over samples; statistics are averaged at the end."""
    weights, masks, statistics = [], [], []
    (low, high), (low_rs, high_rs) = config.tis_bounds, config.rs_bounds
    for train, rollout, mask in zip(*samples.values(), strict=True):
        on = mask.bool()
        ratio = torch.where(on, train - rollout, 0.0)
        total, tokens = ratio.sum(), mask.sum().clamp(min=1)
        levels = {"token": ratio, "sequence": total.expand_as(ratio), "geometric": (total / tokens).expand_as(ratio)}
        kept = mask.clone()
        found = {"tokens": tokens}
        if config.use_rs:
            value = levels[config.rs_level].clamp(-20, 20).exp()
            found |= {"rs_low": ((value < low_rs) * mask).sum(), "rs_high": ((value > high_rs) * mask).sum()}
            kept = kept * ((value >= low_rs) & (value <= high_rs))
            if config.rs_veto_threshold is not None:
                bad = (ratio.exp() < config.rs_veto_threshold) & on
                found |= {"veto_tokens": bad.sum(), "veto": bad.any()}
                kept = kept * ~bad.any()
        weight = levels[config.tis_level].clamp(-20, 20).exp()
        found |= {
            "before": (weight * mask).sum(),
            "low": ((weight < low) * mask).sum(),
            "high": ((weight > high) * mask).sum(),
        }
        if config.tis_mode == "mask":
            kept = kept * ((weight >= low) & (weight <= high))
        else:
            weight = weight.clamp(low if config.tis_mode == "clip" else 0.0, high)
        found["after"] = (weight * mask).sum()
        weight = torch.where(kept > 0, weight, 0.0)
        weights.append(weight)
        masks.append(kept)
        statistics.append(found | _mismatch(train, rollout, ratio, mask, tokens, weight, kept))
    names = statistics[0]
    totals = {name: float(torch.stack([found[name].float() for found in statistics]).sum()) for name in names}
    return weights, masks, totals


def _mismatch(
    train: Tensor, rollout: Tensor, ratio: Tensor, mask: Tensor, tokens: Tensor, weight: Tensor, kept: Tensor
) -> dict[str, Tensor]:
    train_mean, rollout_mean = (torch.where(mask > 0, values, 0.0).sum() / tokens for values in (train, rollout))
    difference = rollout_mean - train_mean
    bounded = ratio.clamp(-20, 20)
    return {
        "train_log_ppl": -train_mean,
        "rollout_log_ppl": -rollout_mean,
        "train_ppl": (-train_mean).exp(),
        "rollout_ppl": (-rollout_mean).exp(),
        "difference": difference,
        "abs_difference": difference.abs(),
        "kl": -ratio.sum(),
        "k3": ((bounded.exp() - 1 - bounded) * mask).sum(),
        "chi2_token": ((2 * bounded).exp() * mask).sum(),
        "chi2_sequence": 2 * ratio.sum(),
        "weight": weight.sum(),
        "square_weight": weight.square().sum(),
        "largest": weight.max(),
        "smallest": torch.where(kept > 0, weight, torch.inf).min(),
        "kept": kept.sum(),
        "finite": (train.isfinite() & rollout.isfinite() | (mask == 0)).all(),
    }


def milliseconds(functions: list[Callable[[], object]], trials: int) -> list[float]:
    """The quarter point of each one's times; they take turns, so that a busy machine is busy for all."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(trials):
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            own.append(1e3 * (time.perf_counter() - start))
    return [sorted(own)[len(own) // 4] for own in times]


def share_of_training(run_dir: Path) -> tuple[float, float, float]:
    """Median seconds of the hook and of training in a step, and their ratio; the first step is left out."""
    lines = [line for line in read_metrics(run_dir / "metrics.jsonl") if "time/importance_sampling" in line][1:]
    if not lines:
        raise ValueError(f"expected time/importance_sampling in {run_dir}/metrics.jsonl, found none: was the hook on?")
    hook, train = (median(float(line[f"time/{name}"]) for line in lines) for name in ("importance_sampling", "train"))
    return hook, train, hook / train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=whole_number(), default=256, help="samples of an optimizer step [256]")
    parser.add_argument("--shortest", type=whole_number(), default=100, help="tokens of the shortest response [100]")
    parser.add_argument("--longest", type=whole_number(), default=4000, help="tokens of the longest response [4000]")
    parser.add_argument("--trials", type=whole_number(), default=15, help="trials of each formulation [15]")
    parser.add_argument("--run-dir", type=Path, help="folder of a run with the hook, to compute its share of training")
    options = parser.parse_args()
    if options.longest < options.shortest:
        parser.error(f"--longest {options.longest} is less than --shortest {options.shortest}")
    torch.set_num_threads(1)
    samples = make_samples(options.samples, options.shortest, options.longest)

    print(f"{options.samples} samples, {sum(map(len, samples['loss_masks']))} tokens")
    print(f"{'settings':20}{'ours, ms':>12}{'reference, ms':>16}{'ratio':>8}")
    ratios = {}
    for name, settings in VARIANTS.items():
        config = MisSettings(**settings)
        ours, reference = milliseconds(
            [
                lambda config=config: compute_mis_weights(config, **samples),
                lambda config=config: per_sample(config, samples),
            ],
            options.trials,
        )
        ratios[name] = reference / ours
        print(f"{name:20}{ours:12.1f}{reference:16.1f}{ratios[name]:8.2f}")
    result = {
        "name": "mismatch correction at token level: per-sample reference / ours",
        "ratio": round(ratios["token"], 3),
        "others": {name: round(ratio, 3) for name, ratio in ratios.items() if name != "token"},
    }
    if options.run_dir:
        hook, train, share = share_of_training(options.run_dir)
        print(f"in {options.run_dir}: {hook:.4f} s of {train:.3f} s of training")
        result["share_of_training"] = round(share, 5)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
