"""The cursor: save at any point, restore, and the same rows follow."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sleuth.data.stream import RowStream


@given(
    size=st.integers(1, 12),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    before=st.lists(st.integers(0, 9), max_size=5),
    after=st.lists(st.integers(0, 9), max_size=5),
)
def test_restored_anywhere_it_goes_on_the_same(
    size: int, seed: int, shuffle: bool, before: list[int], after: list[int]
) -> None:
    stream = RowStream(range(size), seed=seed, shuffle=shuffle)
    for count in before:
        stream.next_rows(count)
    state = json.loads(json.dumps(stream.state_dict()))
    restored = RowStream(range(size), seed=seed, shuffle=shuffle)
    restored.load_state_dict(state)
    assert [restored.next_rows(count) for count in after] == [stream.next_rows(count) for count in after]
    assert restored.state_dict() == stream.state_dict()


@given(size=st.integers(1, 20), seed=st.integers(0, 1000), shuffle=st.booleans())
def test_every_epoch_has_every_row_once(size: int, seed: int, shuffle: bool) -> None:
    stream = RowStream(range(size), seed=seed, shuffle=shuffle)
    for _ in range(3):
        assert sorted(stream.next_rows(size)) == list(range(size))


def test_epochs_and_seeds_differ_and_runs_agree() -> None:
    def epochs(seed: int) -> list[list[int]]:
        stream = RowStream(range(30), seed=seed, shuffle=True)
        return [stream.next_rows(30) for _ in range(2)]

    assert epochs(1) == epochs(1)
    assert epochs(1) != epochs(2)
    assert epochs(1)[0] != epochs(1)[1]


def test_unshuffled_rows_keep_their_order() -> None:
    stream = RowStream("abc", seed=0, shuffle=False)
    assert "".join(stream.next_rows(7)) == "abcabca"
    assert stream.epoch == 2


def test_the_saved_order_holds(caplog: pytest.LogCaptureFixture) -> None:
    stream = RowStream(range(20), seed=1, shuffle=True)
    stream.next_rows(3)
    other = RowStream(range(20), seed=2, shuffle=True)
    with caplog.at_level(logging.WARNING):
        other.load_state_dict(stream.state_dict())
    assert other.next_rows(30) == stream.next_rows(30)
    assert "checkpoint's order" in caplog.text


def test_a_cursor_of_other_data_is_refused() -> None:
    state = RowStream(range(3), seed=0, shuffle=False).state_dict()
    with pytest.raises(ValueError, match="cursor is for 3 rows, but the data has 4"):
        RowStream(range(4), seed=0, shuffle=False).load_state_dict(state)


def test_no_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        RowStream([], seed=0, shuffle=False)
