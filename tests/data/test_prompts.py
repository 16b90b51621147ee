"""Prompt rows: rendered once, with their labels; what is dropped and what is refused."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from transformers import PreTrainedTokenizerFast

from sleuth.arguments import Args, parse_args
from sleuth.data import PromptStream, load_rows
from tests.tiny_models import make_byte_bpe_tokenizer

SEARCH_R1_ROW = {
    "id": "train_0",
    "question": "total number of death row inmates in the us?",
    "golden_answers": np.array(["2,718"], dtype=object),
    "data_source": "nq",
    "prompt": np.array([{"content": "Answer the question: total number?", "role": "user"}], dtype=object),
    "ability": "fact-reasoning",
    "reward_model": {"ground_truth": {"target": np.array(["2,718"], dtype=object)}, "style": "rule"},
    "extra_info": {"index": 0, "split": "train"},
    "metadata": None,
}
RENDERED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_byte_bpe_tokenizer()


def write(path: Path, *rows: dict[str, Any]) -> str:
    pd.DataFrame(list(rows)).to_parquet(path)
    return str(path)


def make_args(path: str, *flags: str) -> Args:
    fixed = "--hf-checkpoint model --num-rollout 1 --colocate --custom-rm-path a.b --rollout-max-context-len 2048"
    return parse_args([*fixed.split(), "--prompt-data", path, *flags])


def load(path: str, tokenizer: PreTrainedTokenizerFast, *flags: str, **kwargs: Any) -> list[Any]:
    return load_rows(path, make_args(path, *flags), tokenizer, **kwargs)


def test_rows_of_the_public_set_load_unchanged(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (row,) = load(write(tmp_path / "t.parquet", SEARCH_R1_ROW), tokenizer, "--apply-chat-template")
    assert row.prompt == [{"content": "Answer the question: total number?", "role": "user"}]
    assert tokenizer.decode(row.prompt_ids) == RENDERED.format("Answer the question: total number?")
    assert row.label == {"ground_truth": {"target": ["2,718"]}, "style": "rule"}
    assert row.metadata == {"data_source": "nq"}


def test_a_text_is_one_user_message_or_stands_as_it_is(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "t.parquet", {"prompt": "hello", "reward_model": 1})
    (templated,) = load(path, tokenizer, "--apply-chat-template")
    (verbatim,) = load(path, tokenizer)
    assert tokenizer.decode(templated.prompt_ids) == RENDERED.format("hello")
    assert tokenizer.decode(verbatim.prompt_ids) == "hello"


def test_special_tokens_come_once(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "t.parquet", {"prompt": RENDERED.format("hi"), "reward_model": 1})
    (row,) = load(path, tokenizer)
    assert row.prompt_ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2


def test_keyword_arguments_and_tools_reach_the_template(tmp_path: Path) -> None:
    tokenizer = make_byte_bpe_tokenizer()
    tokenizer.chat_template = (
        "{{ messages[0]['content'] }}|{{ tools[0]['name'] }}|{{ mood }}|{{ add_generation_prompt }}"
    )
    path = write(tmp_path / "t.parquet", {"prompt": "q", "reward_model": 1, "tools": [{"name": "search"}]})
    (row,) = load(
        path,
        tokenizer,
        "--apply-chat-template",
        "--tool-key",
        "tools",
        "--apply-chat-template-kwargs",
        '{"mood": "calm"}',
    )
    assert tokenizer.decode(row.prompt_ids) == "q|search|calm|True"


def test_messages_without_a_template_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "t.parquet", SEARCH_R1_ROW)
    with pytest.raises(ValueError, match="add --apply-chat-template"):
        load(path, tokenizer)
    bare = make_byte_bpe_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        load(path, bare, "--apply-chat-template")


@pytest.mark.parametrize("prompt", [None, "", [], [{"role": "user"}], 3])
def test_what_is_no_prompt_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, prompt: Any) -> None:
    path = write(tmp_path / "t.parquet", {"prompt": prompt, "reward_model": 1})
    with pytest.raises(ValueError, match=r"expected a text or a list of messages .* row 0 of"):
        load(path, tokenizer, "--apply-chat-template")


@pytest.mark.parametrize(
    ("row", "evaluation", "flag"),
    [
        ({"prompt": "p"}, False, "--label-key"),
        ({"reward_model": 1}, False, "--input-key"),
        ({"prompt": "p"}, True, "--eval-label-key"),
    ],
)
def test_a_missing_column_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], evaluation: bool, flag: str
) -> None:
    path = write(tmp_path / "t.parquet", row)
    with pytest.raises(ValueError, match=rf"expected a column .* \({flag}\) .* found {next(iter(row))}"):
        load(path, tokenizer, evaluation=evaluation)


def test_rows_are_filtered_by_source(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": f"p{i}", "reward_model": i, "data_source": source} for i, source in enumerate("abca")]
    path = write(tmp_path / "t.parquet", *rows)
    kept = load(f"{path}@[1:4]", tokenizer, "--data-source-filter", "a", "c")
    assert [(row.index, row.prompt) for row in kept] == [(2, "p2"), (3, "p3")]
    with pytest.raises(ValueError, match=r"data_source of \['z'\]; found a, b, c"):
        load(path, tokenizer, "--data-source-filter", "z")


def test_the_filter_needs_its_column(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "t.parquet", {"prompt": "p", "reward_model": 1})
    with pytest.raises(ValueError, match=r"'data_source' .*--data-source-filter"):
        load(path, tokenizer, "--data-source-filter", "a")


def test_long_prompts_are_dropped_and_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "x" * length, "reward_model": 1} for length in (3, 400, 5)]
    path = write(tmp_path / "t.parquet", *rows)
    with caplog.at_level(logging.WARNING):
        kept = load(path, tokenizer, "--rollout-max-context-len", "100")
    assert [row.index for row in kept] == [0, 2]
    assert "dropped 1 of 3 prompts" in caplog.text
    with pytest.raises(ValueError, match="none of the 3 prompts"):
        load(path, tokenizer, "--rollout-max-context-len", "2")


def test_metadata_is_a_dictionary(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    row = {"prompt": "p", "reward_model": 1, "info": {"level": "hard"}, "data_source": "nq"}
    (loaded,) = load(write(tmp_path / "t.parquet", row), tokenizer, "--metadata-key", "info")
    assert loaded.metadata == {"level": "hard", "data_source": "nq"}


def test_the_stream_gives_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": f"p{i}", "reward_model": i} for i in range(4)]
    loaded = load(write(tmp_path / "t.parquet", *rows), tokenizer)
    stream = PromptStream(loaded, seed=3, shuffle=True)
    assert {row.label for row in stream.next_groups(4)} == {0, 1, 2, 3}
