"""The zigzag layout: every token once, the same causal work on every rank, and the way back."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sleuth.algo.context_parallel import pad_multiple, padded_length, zigzag_index, zigzag_inverse

layouts = st.integers(1, 5).flatmap(
    lambda cp: st.tuples(
        st.just(cp), st.lists(st.integers(1, 12).map(lambda n: n * pad_multiple(cp)), min_size=1, max_size=6)
    )
)


def reference(lengths, cp, rank):
    positions, start = [], 0
    for length in lengths:
        chunks = np.array_split(np.arange(start, start + length), 2 * cp)
        positions += [*chunks[rank], *chunks[2 * cp - 1 - rank]] if cp > 1 else [*range(start, start + length)]
        start += length
    return positions


@given(layout=layouts)
def test_equals_numpy(layout):
    cp, lengths = layout
    for rank in range(cp):
        assert zigzag_index(lengths, cp, rank).tolist() == reference(lengths, cp, rank)


@given(layout=layouts)
def test_ranks_hold_every_token_once_and_the_inverse_restores_order(layout):
    cp, lengths = layout
    row = torch.arange(sum(lengths)) * 10
    parts = [row[zigzag_index(lengths, cp, rank)] for rank in range(cp)]
    assert torch.equal(torch.cat(parts)[zigzag_inverse(lengths, cp)], row)


@given(layout=layouts)
def test_causal_work_is_equal(layout):
    cp, lengths = layout
    position = torch.cat([torch.arange(length) for length in lengths])
    # Token i attends to i + 1 tokens.
    work = {int((position[zigzag_index(lengths, cp, rank)] + 1).sum()) for rank in range(cp)}
    assert len(work) == 1


def test_two_ranks_by_hand():
    assert zigzag_index([4, 8], 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
    assert zigzag_index([4, 8], 2, 1).tolist() == [1, 2, 6, 7, 8, 9]


def test_uneven_length_is_named():
    with pytest.raises(ValueError, match=r"divide by 2 \* cp_size = 4, found \[6\]"):
        zigzag_index([8, 6], 2, 0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_out_of_range(rank):
    with pytest.raises(ValueError, match=r"rank in \[0, 2\)"):
        zigzag_index([8], 2, rank)


@pytest.mark.parametrize(
    ("length", "multiple", "expected"), [(1, 1, 1), (5, 4, 8), (8, 4, 8), (9, 4, 12), (0, 4, 4), (0, 1, 1)]
)
def test_padded_length(length, multiple, expected):
    assert padded_length(length, multiple) == expected


@pytest.mark.parametrize(("length", "multiple"), [(-1, 4), (3, 0)])
def test_padded_length_refuses(length, multiple):
    with pytest.raises(ValueError, match="expected length >= 0"):
        padded_length(length, multiple)


@pytest.mark.parametrize(("cp", "tp", "expected"), [(1, 1, 1), (1, 2, 2), (2, 1, 4), (2, 2, 8), (4, 1, 8)])
def test_pad_multiple(cp, tp, expected):
    assert pad_multiple(cp, tp) == expected
