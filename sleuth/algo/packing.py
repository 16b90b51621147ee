"""Decides which sample goes into which micro-batch of which data-parallel rank.

Every rank gets the same number of micro-batches, because collective operations need that, and as few as the longest
samples allow. The ranks' work is balanced by an estimated cost. The plan depends on nothing but the lengths.

If the number of samples is divisible by the number of ranks (`--global-batch-size` ensures that), no micro-batch is
empty. Otherwise a rank may get an empty one, `[]`, where nothing else fits (three samples of full length on two ranks);
there are fewer of these than ranks, and `sleuth.algo.optimizer_steps.pack` turns them into padding without weight.
No rank is left without any sample: fewer samples than ranks is an error.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Sequence

logger = logging.getLogger(__name__)

Bin = list[int]
"""Indices of the samples in one micro-batch."""

QUADRATIC_TOKENS = 24_576
"""Sequence length at which attention costs as much as all linear layers: about 12 x hidden size, here of a 3B model."""


def sequence_cost(length: int, quadratic_tokens: int = QUADRATIC_TOKENS) -> float:
    """Estimated cost of training on a sequence, in tokens of linear layers: length + length^2 / quadratic_tokens."""
    return length + length * length / quadratic_tokens


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    max_tokens: int | None = None,
    micro_batch_size: int | None = None,
    balance: bool = True,
) -> list[list[Bin]]:
    """Plan micro-batches: `plan[rank][micro_batch]` lists indices into `lengths` (tokens, padding included).

    Give either `max_tokens`, the most tokens of a micro-batch (a longer sample gets one of its own, with a
    warning), or `micro_batch_size`, the most samples of one. With `balance` any rank may get any sample; without it,
    sample i goes to rank i modulo num_ranks.

    The plan holds every sample exactly once. Raises ValueError if there are fewer samples than ranks, or if the
    limits contradict each other or are below 1.
    """
    _check(lengths, num_ranks, max_tokens, micro_batch_size)
    limits = _Limits(lengths, max_tokens, micro_batch_size)
    limits.warn_of_oversized()
    plan = _plan_balanced(limits, num_ranks) if balance else _plan_round_robin(limits, num_ranks)
    # The heaviest first: if memory does not suffice, that shows at once. And where ranks wait for each other in every
    # micro-batch (expert parallelism), they then work on micro-batches of similar size.
    return [sorted((sorted(batch) for batch in rank), key=lambda batch: (-limits.cost(batch), batch)) for rank in plan]


class _Limits:
    """Which samples fit into one micro-batch, and what they cost."""

    def __init__(self, lengths: Sequence[int], max_tokens: int | None, micro_batch_size: int | None) -> None:
        self.lengths = list(lengths)
        self.max_tokens = max_tokens
        self.micro_batch_size = micro_batch_size
        self.costs = [sequence_cost(length) for length in lengths]
        self.sizes = self.lengths if max_tokens is not None else [1] * len(self.lengths)
        capacity = max_tokens if max_tokens is not None else micro_batch_size
        assert capacity is not None
        self.capacity = capacity

    def warn_of_oversized(self) -> None:
        oversized = [size for size in self.sizes if size > self.capacity]
        if oversized:
            logger.warning(
                "%d of %d samples are longer than a micro-batch of %d tokens (the longest has %d): each stands alone "
                "and may not fit into memory; raise --max-tokens-per-gpu or shorten the context",
                len(oversized), len(self.sizes), self.capacity, max(oversized),
            )  # fmt: skip

    def cost(self, batch: Bin) -> float:
        return sum(self.costs[index] for index in batch)

    def by_size(self, indices: Sequence[int]) -> list[int]:
        """The indices sorted by size, the largest first; equal ones keep their order."""
        return sorted(indices, key=lambda index: (-self.sizes[index], -self.costs[index], index))


def _plan_balanced(limits: _Limits, num_ranks: int) -> list[list[Bin]]:
    """Plan the number of micro-batches per rank that few bins need, or one fewer if an even spread allows it."""
    everything = range(len(limits.lengths))
    few = _few_bins(limits, everything, num_ranks)
    enough = -(-len(few) // num_ranks)
    for per_rank in (max(enough - 1, 1), enough):
        batches = _spread(limits, everything, per_rank * num_ranks)
        if batches is not None:
            return _deal(limits, batches, num_ranks)
    return _deal(limits, _split(limits, few, enough * num_ranks), num_ranks)


def _few_bins(limits: _Limits, indices: Sequence[int], num_ranks: int) -> list[Bin]:
    """Best-fit bins; filled one by one if best fit needs more micro-batches per rank than the sum of sizes does."""
    best_fit = _best_fit_decreasing(limits, indices)
    needed = -(-sum(limits.sizes) // limits.capacity)
    if -(-len(best_fit) // num_ranks) <= -(-needed // num_ranks):
        return best_fit
    return min(best_fit, _fill_one_by_one(limits, indices), key=len)


def _fill_one_by_one(limits: _Limits, indices: Sequence[int]) -> list[Bin]:
    """Fill one bin after the other: with the largest sample left, and the others that together fill it best."""
    left, bins = limits.by_size(indices), []
    while left:
        first, *left = left
        chosen = _largest_sum(limits, left, limits.capacity - limits.sizes[first])
        bins.append([first, *chosen])
        taken = set(chosen)
        left = [index for index in left if index not in taken]
    return bins


def _largest_sum(limits: _Limits, indices: Sequence[int], room: int) -> Bin:
    """The subset of `indices` (sorted, largest first) whose sizes have the largest sum that fits into `room`.

    Among equal sums, large samples are preferred. Bit s of `reachable[k]` says whether a subset of the k smallest
    samples has the sum s.
    """
    fitting = [index for index in reversed(indices) if limits.sizes[index] <= room]
    if not fitting:
        return []
    within, reachable = (1 << (room + 1)) - 1, [1]
    for index in fitting:
        reachable.append((reachable[-1] | reachable[-1] << limits.sizes[index]) & within)
    total, chosen = reachable[-1].bit_length() - 1, []
    for number in range(len(fitting), 0, -1):
        size = limits.sizes[fitting[number - 1]]
        if size <= total and reachable[number - 1] >> (total - size) & 1:
            chosen.append(fitting[number - 1])
            total -= size
    return chosen


def _plan_round_robin(limits: _Limits, num_ranks: int) -> list[list[Bin]]:
    everything = range(len(limits.lengths))
    ranks = [_best_fit_decreasing(limits, everything[rank::num_ranks]) for rank in range(num_ranks)]
    per_rank = max(len(batches) for batches in ranks)
    return [_split(limits, batches, per_rank) for batches in ranks]


def _best_fit_decreasing(limits: _Limits, indices: Sequence[int]) -> list[Bin]:
    """Fill few bins: the largest sample first, each into the fullest bin that still has room for it."""
    bins: list[Bin] = []
    free: list[tuple[int, int]] = []  # (room, bin), sorted
    for index in limits.by_size(indices):
        size = limits.sizes[index]
        slot = bisect_left(free, (size, 0))
        if slot < len(free):
            room, number = free.pop(slot)
        else:
            room, number = limits.capacity, len(bins)
            bins.append([])
        bins[number].append(index)
        if room > size:
            insort(free, (room - size, number))
    return bins


def _spread(limits: _Limits, indices: Sequence[int], count: int) -> list[Bin] | None:
    """Fill `count` bins of similar cost: the largest sample first, each into the cheapest bin that has room for it.

    Returns None if a sample finds no bin: an even spread fills bins less tightly than best fit does.
    """
    bins: list[Bin] = [[] for _ in range(count)]
    sizes, costs = [0] * count, [0.0] * count
    for index in limits.by_size(indices):
        size = limits.sizes[index]
        fitting = [number for number in range(count) if not bins[number] or sizes[number] + size <= limits.capacity]
        if not fitting:
            return None
        target = min(fitting, key=lambda number: (costs[number], number))
        bins[target].append(index)
        sizes[target] += size
        costs[target] += limits.costs[index]
    return bins


def _split(limits: _Limits, bins: list[Bin], count: int) -> list[Bin]:
    """Split the costliest bins in two until there are `count`; add empty bins once each holds a single sample."""
    bins = [list(batch) for batch in bins]
    while len(bins) < count:
        number = max(range(len(bins)), key=lambda i: (len(bins[i]) > 1, limits.cost(bins[i])))
        if len(bins[number]) < 2:
            bins.append([])
            continue
        halves: tuple[Bin, Bin] = ([], [])
        for index in limits.by_size(bins[number]):
            min(halves, key=limits.cost).append(index)
        bins[number] = halves[0]
        bins.append(halves[1])
    return bins


def _deal(limits: _Limits, bins: list[Bin], num_ranks: int) -> list[list[Bin]]:
    """Deal equally many bins to each rank: the costliest first, each to the rank with the least work so far."""
    per_rank = len(bins) // num_ranks
    ranks: list[list[Bin]] = [[] for _ in range(num_ranks)]
    costs = [0.0] * num_ranks
    for batch in sorted(bins, key=lambda batch: (-limits.cost(batch), batch)):
        open_ranks = [rank for rank in range(num_ranks) if len(ranks[rank]) < per_rank]
        rank = min(open_ranks, key=lambda rank: (costs[rank], rank))
        ranks[rank].append(batch)
        costs[rank] += limits.cost(batch)
    return ranks


def _check(lengths: Sequence[int], num_ranks: int, max_tokens: int | None, micro_batch_size: int | None) -> None:
    if num_ranks < 1:
        raise ValueError(f"expected at least one rank, found num_ranks={num_ranks}")
    if (max_tokens is None) == (micro_batch_size is None):
        raise ValueError(
            "expected either max_tokens (--use-dynamic-batch-size with --max-tokens-per-gpu) or micro_batch_size, "
            f"found max_tokens={max_tokens}, micro_batch_size={micro_batch_size}"
        )
    for name, limit in (("max_tokens", max_tokens), ("micro_batch_size", micro_batch_size)):
        if limit is not None and limit < 1:
            raise ValueError(f"expected {name} >= 1, found {limit}")
    if len(lengths) < num_ranks:
        raise ValueError(
            f"expected at least one sample for each of {num_ranks} data-parallel ranks, found {len(lengths)} samples; "
            "raise --global-batch-size or train on fewer ranks"
        )
    if min(lengths) < 1:
        raise ValueError(f"expected samples of at least one token, found a length of {min(lengths)}")
