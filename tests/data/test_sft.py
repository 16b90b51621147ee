"""Supervised trajectories: segments encoded one by one, weights aligned with the tokens after the first."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sleuth.data import check_sft_rows, load_sft_rows
from sleuth.data.sft import encode_segments
from tests.data.tokenizers import with_bos
from tests.tiny_models import make_byte_bpe_tokenizer

SEGMENTS = [
    {"text": "<|im_start|>user\nwho?<|im_end|>\n", "weight": 0.1},
    {"text": "<search> hamlet </search>", "weight": 1.0},
    {"text": "\n\n<information> x </information>\n\n", "weight": 0.0},
]
TOKENIZER = make_byte_bpe_tokenizer()


def test_each_segment_is_encoded_on_its_own() -> None:
    sample = encode_segments(SEGMENTS, TOKENIZER)
    parts = [TOKENIZER.encode(segment["text"], add_special_tokens=False) for segment in SEGMENTS]
    assert sample.token_ids == parts[0] + parts[1] + parts[2]
    assert sample.token_ids != TOKENIZER.encode("".join(s["text"] for s in SEGMENTS), add_special_tokens=False)
    assert sample.prompt_length == 1
    assert sample.loss_mask == [0.1] * (len(parts[0]) - 1) + [1.0] * len(parts[1]) + [0.0] * len(parts[2])


@given(st.lists(st.tuples(st.text(min_size=1, max_size=8), st.floats(0, 2)), min_size=2, max_size=5))
def test_weights_and_tokens_stay_equally_long(parts: list[tuple[str, float]]) -> None:
    sample = encode_segments([{"text": text, "weight": weight} for text, weight in parts], TOKENIZER)
    assert len(sample.loss_mask) == len(sample.token_ids) - 1


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_rows_of_a_file_and_its_cursor(tmp_path: Path, suffix: str) -> None:
    rows = [{"segments": [{"text": f"sample {i}", "weight": 1.0}]} for i in range(5)]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    stream = load_sft_rows(str(path), TOKENIZER, seed=4, shuffle=True)
    stream.next_samples(3)
    restored = load_sft_rows(str(path), TOKENIZER, seed=4, shuffle=True)
    restored.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert restored.next_samples(7) == stream.next_samples(7)


BAD_SEGMENT = [{"text": "a"}, {"text": 1, "weight": 1}, {"text": "a", "weight": -1}, {"text": "a", "weight": "1"}]
BAD_SEGMENT += [{"text": "a", "weight": float("nan")}, {"text": "a", "weight": True}]


@pytest.mark.parametrize("segments", [None, [], "text", *([segment] for segment in BAD_SEGMENT)])
def test_what_are_no_segments_is_refused(tmp_path: Path, segments: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"segments": SEGMENTS}) + "\n" + json.dumps({"segments": segments}))
    with pytest.raises(ValueError, match=r"expected a list of .* in row 1 of"):
        load_sft_rows(str(path), TOKENIZER)


def test_a_file_without_segments_names_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x"}')
    with pytest.raises(ValueError, match=r"column 'segments' \(--loss-type sft\) in .* found prompt"):
        load_sft_rows(str(path), TOKENIZER)


def test_a_trajectory_of_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 tokens"):
        encode_segments([{"text": "", "weight": 1.0}], TOKENIZER)


def test_a_trajectory_begins_as_the_tokenizer_begins_texts() -> None:
    tokenizer = with_bos(TOKENIZER)
    plain, begun = encode_segments(SEGMENTS, TOKENIZER), encode_segments(SEGMENTS, tokenizer)
    assert begun.token_ids == [0, *plain.token_ids]
    assert begun.loss_mask == [0.1, *plain.loss_mask]
    marked = [{"text": "<|endoftext|>", "weight": 0.5}, *SEGMENTS]
    assert encode_segments(marked, tokenizer).token_ids == begun.token_ids


def test_a_segment_that_cannot_be_encoded_names_its_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"segments": SEGMENTS}) + '\n{"segments": [{"text": "a\\ud835", "weight": 1}]}')
    check_sft_rows(f"{path}@[:1]", TOKENIZER)
    for read in (load_sft_rows, check_sft_rows):
        with pytest.raises(ValueError, match=r"row 1 of .*rows.jsonl, column 'segments', found the lone surrogate"):
            read(str(path), TOKENIZER)
