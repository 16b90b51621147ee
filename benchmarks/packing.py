"""How full micro-batches are, and how evenly ranks are loaded, beside plain first fit.

    python -m benchmarks.packing [--ranks 8] [--samples 256] [--max-tokens 9216] [--trials 20]

Reference: first fit in the order of arrival, bins dealt to ranks in turn, the short ranks filled up with
empty micro-batches. Bin fill: tokens over what all micro-batches could hold (higher is better). Slowest
over mean: estimated cost of the dearest rank over the mean of ranks; 1 is the best there is, and what is above
it is time that the other ranks wait. The last line is one JSON object; its ratio is
ours / reference of slowest over mean, averaged over the distributions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

from sleuth.algo.packing import plan_micro_batches, sequence_cost

Plan = list[list[list[int]]]


def distributions(rng: np.random.Generator, count: int, longest: int) -> dict[str, np.ndarray]:
    """Sequence lengths (tokens) as they come up: by groups of eight that share a prompt, except the uniform."""

    def groups(draw: Callable[[int], np.ndarray]) -> np.ndarray:
        scale = np.repeat(rng.lognormal(0, 0.4, -(-count // 8)), 8)[:count]
        return draw(count) * scale

    searches = rng.integers(0, 3, count)
    shapes = {
        "uniform": rng.uniform(100, longest, count),
        "lognormal": groups(lambda n: rng.lognormal(6.5, 0.6, n)),
        "heavy tail": groups(lambda n: 200 * (1 + rng.pareto(1.2, n))),
        "search turns": groups(lambda n: 350 + searches * rng.uniform(500, 1100, n) + rng.exponential(250, n)),
        "half truncated": np.where(rng.random(count) < 0.5, longest, rng.uniform(200, longest / 2, count)),
    }
    return {name: np.clip(lengths, 1, longest).astype(int) for name, lengths in shapes.items()}


def first_fit_round_robin(lengths: Sequence[int], num_ranks: int, max_tokens: int) -> Plan:
    bins: list[list[int]] = []
    used: list[int] = []
    for index, length in enumerate(lengths):
        slot = next((i for i, tokens in enumerate(used) if tokens + length <= max_tokens), len(bins))
        if slot == len(bins):
            bins.append([])
            used.append(0)
        bins[slot].append(index)
        used[slot] += length
    bins += [[] for _ in range(-len(bins) % num_ranks)]
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


@dataclass(frozen=True)
class Score:
    fill: float
    slowest: float
    seconds: float


def score(planner: Callable[[], Plan], lengths: Sequence[int], max_tokens: int) -> Score:
    start = time.perf_counter()
    plan = planner()
    seconds = time.perf_counter() - start
    bins = sum(len(rank) for rank in plan)
    costs = [sum(sequence_cost(lengths[i]) for batch in rank for i in batch) for rank in plan]
    return Score(sum(lengths) / (bins * max_tokens), max(costs) / mean(costs), seconds)


def measure(ranks: int, samples: int, max_tokens: int, trials: int) -> dict[str, tuple[Score, Score]]:
    """Mean scores (ours, reference) of every distribution over `trials` seeds."""
    scores: dict[str, list[tuple[Score, Score]]] = {}
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        for name, drawn in distributions(rng, samples, longest=min(4096, max_tokens)).items():
            lengths = drawn.tolist()
            ours = score(
                lambda lengths=lengths: plan_micro_batches(lengths, num_ranks=ranks, max_tokens=max_tokens),
                lengths,
                max_tokens,
            )
            reference = score(
                lambda lengths=lengths: first_fit_round_robin(lengths, ranks, max_tokens), lengths, max_tokens
            )
            scores.setdefault(name, []).append((ours, reference))
    return {name: (average([o for o, _ in pairs]), average([r for _, r in pairs])) for name, pairs in scores.items()}


def average(scores: list[Score]) -> Score:
    return Score(mean(s.fill for s in scores), mean(s.slowest for s in scores), mean(s.seconds for s in scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks [8]")
    parser.add_argument("--samples", type=int, default=256, help="samples of an optimizer step [256]")
    parser.add_argument("--max-tokens", type=int, default=9216, help="tokens of a micro-batch [9216]")
    parser.add_argument("--trials", type=int, default=20, help="seeds to average over [20]")
    options = parser.parse_args()
    table = measure(options.ranks, options.samples, options.max_tokens, options.trials)

    print(f"{'':16}{'bin fill':>20}{'slowest / mean':>20}{'ms a plan':>20}")
    print(f"{'lengths':16}" + f"{'ours':>10}{'reference':>10}" * 3)
    for name, (ours, ref) in table.items():
        cells = (ours.fill, ref.fill, ours.slowest, ref.slowest, ours.seconds * 1e3, ref.seconds * 1e3)
        print(f"{name:16}" + "".join(f"{cell:10.3f}" for cell in cells))

    total, reference = average([o for o, _ in table.values()]), average([r for _, r in table.values()])
    print(
        json.dumps(
            {
                "name": "packing: slowest rank over mean, ours / first fit + round robin",
                "ratio": round(total.slowest / reference.slowest, 4),
                "ours": round(total.slowest, 4),
                "reference": round(reference.slowest, 4),
                "ours_bin_fill": round(total.fill, 4),
                "reference_bin_fill": round(reference.fill, 4),
            }
        )
    )


if __name__ == "__main__":
    main()
