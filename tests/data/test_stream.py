"""The cursor: save at any point, restore, and the same rows follow."""

import json
import logging
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sleuth.data import PromptRow, PromptStream
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
    with pytest.raises(ValueError, match=r"cursor is for 3 rows, but the data has 4; .*--finetune loads weights alone"):
        RowStream(range(4), seed=0, shuffle=False).load_state_dict(state)


def test_other_rows_in_the_same_number_are_refused() -> None:
    rows = list(range(100))
    state = json.loads(json.dumps(RowStream(rows, seed=0, shuffle=True).state_dict()))
    RowStream(list(rows), seed=1, shuffle=False).load_state_dict(state)
    rows[50], rows[98] = rows[98], rows[50]
    with pytest.raises(
        ValueError, match=r"other rows: of the 100, the first that differ are among rows 48 to 51; .*--fin"
    ):
        RowStream(rows, seed=0, shuffle=True).load_state_dict(state)


def test_checkpoints_without_a_fingerprint_are_loaded() -> None:
    state = RowStream("abc", seed=0, shuffle=False).state_dict() | {"position": 1}
    del state["fingerprint"]
    stream = RowStream("xyz", seed=0, shuffle=False)
    stream.load_state_dict(state)
    assert stream.next_rows(1) == ["y"]


def test_the_fingerprint_of_prompts_is_that_of_tokens_and_labels() -> None:
    def fingerprint(*rows: PromptRow) -> list[str]:
        return PromptStream(rows, seed=0, shuffle=False).fingerprint()

    row = PromptRow(0, "a", [1, 2], {"target": ["\ud835"]})
    assert fingerprint(row) == ["43350d2e4f030c21"]  # another process, another year: the same
    assert fingerprint(replace(row, index=7, prompt="b", metadata={"a": 1}, file="x")) == fingerprint(row)
    assert fingerprint(replace(row, label={"target": ["b"]})) != fingerprint(row)
    assert fingerprint(replace(row, prompt_ids=[1, 3])) != fingerprint(row)


def test_a_fingerprint_is_made_in_about_a_second() -> None:
    rows = [PromptRow(i, "", list(range(i % 7, 150)), {"ground_truth": {"target": [str(i)]}}) for i in range(17_000)]
    start = time.process_time()
    PromptStream(rows, seed=0, shuffle=False).fingerprint()
    assert time.process_time() - start < 0.5  # for a tenth of a big set; about 0.05 s where nothing else runs


def test_no_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        RowStream([], seed=0, shuffle=False)
