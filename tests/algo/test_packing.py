"""Plans of micro-batches: what must hold of every plan, and some by hand."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sleuth.algo.packing import plan_micro_batches, sequence_cost

MAX_TOKENS = 1000
lengths_and_ranks = st.integers(1, 6).flatmap(
    lambda ranks: st.tuples(st.lists(st.integers(1, 1300), min_size=ranks, max_size=60), st.just(ranks))
)
even_lengths_and_ranks = st.tuples(st.integers(1, 6), st.integers(1, 12)).flatmap(
    lambda case: st.tuples(
        st.lists(st.integers(1, 1300), min_size=case[0] * case[1], max_size=case[0] * case[1]), st.just(case[0])
    )
)
limits = st.one_of(st.just({"max_tokens": MAX_TOKENS}), st.integers(1, 9).map(lambda size: {"micro_batch_size": size}))
balance = st.booleans()


def fits(batch, lengths, limit):
    if "micro_batch_size" in limit:
        return len(batch) <= limit["micro_batch_size"]
    return len(batch) == 1 or sum(lengths[i] for i in batch) <= limit["max_tokens"]


@given(case=lengths_and_ranks, limit=limits, balance=balance)
def test_every_plan_is_complete_even_and_within_limits(case, limit, balance):
    lengths, ranks = case
    plan = plan_micro_batches(lengths, num_ranks=ranks, balance=balance, **limit)
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    batches = [batch for rank in plan for batch in rank]
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(fits(batch, lengths, limit) for batch in batches if batch)
    assert all(any(rank) for rank in plan), "a rank without any sample"
    assert all(batch == sorted(batch) for batch in batches)


@given(case=even_lengths_and_ranks, limit=limits, balance=balance)
def test_no_empty_micro_batch_where_samples_divide_by_ranks(case, limit, balance):
    lengths, ranks = case
    plan = plan_micro_batches(lengths, num_ranks=ranks, balance=balance, **limit)
    assert all(batch for rank in plan for batch in rank)


@given(case=lengths_and_ranks, limit=limits, balance=balance)
def test_fewer_empty_micro_batches_than_ranks(case, limit, balance):
    lengths, ranks = case
    plan = plan_micro_batches(lengths, num_ranks=ranks, balance=balance, **limit)
    assert sum(not batch for rank in plan for batch in rank) < ranks


@given(case=lengths_and_ranks, limit=limits, balance=balance)
def test_plans_are_deterministic(case, limit, balance):
    lengths, ranks = case
    first, second = (plan_micro_batches(lengths, num_ranks=ranks, balance=balance, **limit) for _ in range(2))
    assert first == second


@given(case=lengths_and_ranks)
def test_micro_batches_are_few(case):
    lengths, ranks = case
    plan = plan_micro_batches(lengths, num_ranks=ranks, max_tokens=MAX_TOKENS)
    alone = sum(length > MAX_TOKENS for length in lengths)
    needed = -(-sum(length for length in lengths if length <= MAX_TOKENS) // MAX_TOKENS)
    # No two bins of best fit could be one, so they are more than half full on average.
    assert -(-(alone + needed) // ranks) <= len(plan[0]) <= -(-(alone + 2 * needed) // ranks)


@given(lengths=st.lists(st.integers(1, 900), min_size=64, max_size=200))
def test_ranks_are_balanced(lengths):
    plan = plan_micro_batches(lengths, num_ranks=4, max_tokens=MAX_TOKENS)
    costs = [sum(sequence_cost(lengths[i]) for batch in rank for i in batch) for rank in plan]
    assert max(costs) - min(costs) <= sequence_cost(1000)


def test_fixed_size_fills_each_micro_batch_when_it_divides():
    plan = plan_micro_batches([5] * 24, num_ranks=2, micro_batch_size=4)
    assert [[len(batch) for batch in rank] for rank in plan] == [[4, 4, 4], [4, 4, 4]]


def test_without_balance_ranks_get_every_nth_sample():
    plan = plan_micro_batches([100, 900, 100, 900], num_ranks=2, max_tokens=1000, balance=False)
    assert plan == [[[0], [2]], [[1], [3]]]


def test_long_and_short_are_paired():
    plan = plan_micro_batches([100, 900, 900, 100], num_ranks=2, max_tokens=1000)
    assert sorted(tuple(sorted(rank[0])) for rank in plan) in ([(0, 1), (2, 3)], [(0, 2), (1, 3)])


def test_count_is_raised_for_ranks_by_splitting():
    assert plan_micro_batches([10, 10, 10, 10], num_ranks=4, max_tokens=1000) == [[[0]], [[1]], [[2]], [[3]]]


def test_oversized_samples_stand_alone_and_are_logged(caplog):
    with caplog.at_level(logging.WARNING):
        plan = plan_micro_batches([1500, 10, 10, 10], num_ranks=1, max_tokens=1000)
    assert plan == [[[0], [1, 2, 3]]]
    assert "1 of 4 samples are longer than a micro-batch of 1000 tokens (the longest has 1500)" in caplog.text


def test_an_even_spread_that_does_not_fit_falls_back_to_best_fit():
    # Spread evenly, 500 + 400 and 500 + 300 leave no room for 300; best fit makes 500 + 500 and 400 + 300 + 300.
    lengths = [500, 500, 400, 300, 300]
    plan = plan_micro_batches(lengths, num_ranks=2, max_tokens=1000)
    assert [len(rank) for rank in plan] == [1, 1]


def test_an_even_spread_may_get_by_with_fewer_than_best_fit():
    # Best fit makes 600 + 300 and 500 + 200 + 200 and has 200 left over.
    (rank,) = plan_micro_batches([200, 200, 600, 300, 200, 500], num_ranks=1, max_tokens=1000)
    assert len(rank) == 2


def test_bins_are_filled_one_by_one_where_best_fit_wastes_one():
    # Best fit makes 600 + 300, 500 + 400 and 200; the sum of all fills two bins exactly: 600 + 400 and 500 + 300 + 200.
    (rank,) = plan_micro_batches([600, 500, 400, 300, 200], num_ranks=1, max_tokens=1000)
    assert len(rank) == 2


def test_the_heaviest_micro_batch_comes_first():
    (rank,) = plan_micro_batches([900, 100, 700, 250], num_ranks=1, max_tokens=1000)
    sizes = [sum([900, 100, 700, 250][i] for i in batch) for batch in rank]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([5, 5], {"num_ranks": 3, "max_tokens": 10}, "each of 3 data-parallel ranks, found 2 samples"),
        ([], {"num_ranks": 1, "max_tokens": 10}, "found 0 samples"),
        ([5], {"num_ranks": 0, "max_tokens": 10}, "num_ranks=0"),
        ([5], {"num_ranks": 1}, "max_tokens=None, micro_batch_size=None"),
        ([5], {"num_ranks": 1, "max_tokens": 10, "micro_batch_size": 1}, "max_tokens=10, micro_batch_size=1"),
        ([5], {"num_ranks": 1, "max_tokens": 0}, "max_tokens >= 1, found 0"),
        ([5], {"num_ranks": 1, "micro_batch_size": 0}, "micro_batch_size >= 1, found 0"),
        ([5, 0], {"num_ranks": 1, "max_tokens": 10}, "a length of 0"),
    ],
)
def test_bad_requests_are_named(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        plan_micro_batches(lengths, **options)
