"""How full micro-batches are, and how evenly ranks are loaded, beside plain first fit.

    python -m benchmarks.packing [--ranks 8] [--samples 256 1024 4096] [--max-tokens 9216] [--trials 5]

Reference: first fit in the order of arrival, bins dealt to ranks in turn, the short ranks filled up with
empty micro-batches. Bin fill: tokens over what all micro-batches could hold (higher is better). `most` is the fill that
the data allow at best: every rank makes as many micro-batches as any other, so their number is a multiple of the
ranks' number, and at least the tokens over what one holds (no plan may reach it where samples are large beside a
micro-batch). Slowest over mean: estimated cost of the dearest rank over the mean of ranks; 1 is the best there is, and
what is above it is time that the other ranks wait. The last line is one JSON object; its ratio is ours / reference of
slowest over mean, averaged over the distributions.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import mean

import numpy as np
from tokenizers import Tokenizer

from benchmarks.options import whole_number
from sleuth.algo.packing import plan_micro_batches, sequence_cost

Plan = list[list[list[int]]]


@functools.cache
def passage_lengths() -> np.ndarray:
    """Tokens of the demo's Wikipedia passages."""
    tokenizer = Tokenizer.from_file("data/demo/model/tokenizer.json")
    with gzip.open("data/demo/corpus.jsonl.gz", "rt", encoding="utf-8") as lines:
        contents = [json.loads(line)["contents"] for line in lines]
    return np.array([len(encoding.ids) for encoding in tokenizer.encode_batch_fast(contents)])


def search_lengths(rng: np.random.Generator, count: int) -> np.ndarray:
    """Trajectories of the search conversation: one to three searches, each with three real passages, cut at 500."""
    searches = rng.integers(1, 4, count)
    observations = np.minimum(rng.choice(passage_lengths(), (count, 3, 3)).sum(2), 500)
    found = (observations * (np.arange(3) < searches[:, None])).sum(1)
    return 250 + found + (rng.lognormal(4.2, 0.5, (count, 4)) * (np.arange(4) <= searches[:, None])).sum(1)


def distributions(rng: np.random.Generator, count: int, longest: int) -> dict[str, np.ndarray]:
    """Sequence lengths (tokens) as they come up: by groups of eight that share a prompt, except the uniform."""

    def groups(draw: Callable[[int], np.ndarray]) -> np.ndarray:
        scale = np.repeat(rng.lognormal(0, 0.4, -(-count // 8)), 8)[:count]
        return draw(count) * scale

    searches = rng.integers(0, 3, count)
    shapes = {
        "real passages": search_lengths(rng, count),
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
    most: float
    slowest: float
    seconds: float


def score(planner: Callable[[], Plan], lengths: Sequence[int], max_tokens: int) -> Score:
    start = time.perf_counter()
    plan = planner()
    seconds = time.perf_counter() - start
    bins = sum(len(rank) for rank in plan)
    costs = [sum(sequence_cost(lengths[i]) for batch in rank for i in batch) for rank in plan]
    needed = -(-sum(lengths) // max_tokens)
    most = sum(lengths) / (-(-needed // len(plan)) * len(plan) * max_tokens)
    return Score(sum(lengths) / (bins * max_tokens), most, max(costs) / mean(costs), seconds)


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
    return Score(*(mean(getattr(s, field.name) for s in scores) for field in fields(Score)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=whole_number(), default=8, help="data-parallel ranks [8]")
    parser.add_argument(
        "--samples", type=whole_number(), nargs="+", default=[256, 1024, 4096], help="samples of an optimizer step"
    )
    parser.add_argument(
        "--max-tokens", type=whole_number(400), default=9216, help="tokens of a micro-batch, at least 400 [9216]"
    )
    parser.add_argument("--trials", type=whole_number(), default=5, help="seeds to average over [5]")
    options = parser.parse_args()
    scores: list[tuple[Score, Score]] = []
    print(f"{'':22}{'bin fill':>30}{'slowest / mean':>20}{'ms a plan':>20}")
    print(f"{'samples lengths':22}{'ours':>10}{'reference':>10}{'most':>10}" + f"{'ours':>10}{'reference':>10}" * 2)
    for samples in options.samples:
        for name, (ours, ref) in measure(options.ranks, samples, options.max_tokens, options.trials).items():
            cells = (ours.fill, ref.fill, ours.most, ours.slowest, ref.slowest, ours.seconds * 1e3, ref.seconds * 1e3)
            print(f"{samples:7} {name:14}" + "".join(f"{cell:10.3f}" for cell in cells))
            scores.append((ours, ref))

    total, reference = average([o for o, _ in scores]), average([r for _, r in scores])
    print(
        json.dumps(
            {
                "name": "packing: slowest rank over mean, ours / first fit + round robin",
                "ratio": round(total.slowest / reference.slowest, 4),
                "ours": round(total.slowest, 4),
                "reference": round(reference.slowest, 4),
                "worst": round(max(o.slowest for o, _ in scores), 4),
                "ours_bin_fill": round(total.fill, 4),
                "most_bin_fill": round(total.most, 4),
                "worst_fill_over_most": round(min(o.fill / o.most for o, _ in scores), 4),
                "reference_bin_fill": round(reference.fill, 4),
            }
        )
    )


if __name__ == "__main__":
    main()
