"""Prompt rows: rendered once, with their labels; what is dropped and what is refused."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from transformers import PreTrainedTokenizerFast

from sleuth.arguments import Args, parse_args
from sleuth.data import PromptStream, check_rows, load_rows
from sleuth.data.records import Records, read_records
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


@pytest.mark.parametrize("prompt", [None, "", [], [{"role": "user"}], [{"role": None, "content": "q"}], 3])
def test_what_is_no_prompt_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, prompt: Any) -> None:
    path = write(tmp_path / "t.parquet", {"prompt": prompt, "reward_model": 1})
    with pytest.raises(ValueError, match=r"expected a text or a list .* row 0 of .*t.parquet, column 'prompt'"):
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
    with pytest.raises(ValueError, match=r"data_source of \['z'\] \(--data-source-filter\); found a, b, c"):
        load(path, tokenizer, "--data-source-filter", "z")


def test_training_and_evaluation_have_filters_of_their_own(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": f"p{i}", "reward_model": i, "data_source": source} for i, source in enumerate("abca")]
    path = write(tmp_path / "t.parquet", *rows)
    evaluated = ("--eval-interval", "1", "--eval-prompt-data", "t", path)
    flags = ("--data-source-filter", "a", *evaluated, "--eval-data-source-filter", "b", "c")
    assert [row.index for row in load(path, tokenizer, *flags)] == [0, 3]
    assert [row.index for row in load(path, tokenizer, *flags, evaluation=True)] == [1, 2]
    assert len(load(path, tokenizer, *flags[:2], evaluation=True)) == 4
    with pytest.raises(ValueError, match=r"\['z'\] \(--eval-data-source-filter\)"):
        load(path, tokenizer, *evaluated, "--eval-data-source-filter", "z", evaluation=True)


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


def test_json_text_of_messages_and_text_parts_are_rendered(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    content = [{"type": "text", "text": "who "}, {"type": "text", "text": "wrote?"}]
    for prompt in ([{"role": "user", "content": content}], json.dumps([{"role": "user", "content": content}])):
        path = write(tmp_path / "t.parquet", {"prompt": prompt, "reward_model": 1})
        (row,) = load(path, tokenizer, "--apply-chat-template")
        assert row.prompt == [{"role": "user", "content": "who wrote?"}]
        assert tokenizer.decode(row.prompt_ids) == RENDERED.format("who wrote?")


def test_padding_of_parquet_does_not_reach_the_template(tmp_path: Path) -> None:
    tokenizer = make_byte_bpe_tokenizer()
    tokenizer.chat_template = "{{ tools[0] | tojson }}{{ 'day' in messages[0] }}"
    cities = {"name": "weather", "parameters": {"city": {"type": "string"}}}
    days = {"name": "calendar", "parameters": {"day": {"type": "string"}}}
    rows = [
        {"prompt": [{"role": "user", "content": "q"}], "reward_model": 1, "tools": [cities]},
        {"prompt": [{"role": "user", "content": "q", "day": "1"}], "reward_model": 1, "tools": [days]},
        {"prompt": [{"role": "user", "content": "q"}], "reward_model": 1, "tools": [cities]},
    ]
    path = write(tmp_path / "t.parquet", *rows)
    loaded = load(path, tokenizer, "--apply-chat-template", "--tool-key", "tools")
    assert [tokenizer.decode(row.prompt_ids) for row in loaded] == [
        json.dumps(cities) + "False",
        json.dumps(days) + "True",
        json.dumps(cities) + "False",
    ]
    texts = write(tmp_path / "j.parquet", *({**row, "tools": json.dumps(row["tools"])} for row in rows))
    again = load(texts, tokenizer, "--apply-chat-template", "--tool-key", "tools")
    assert [row.prompt_ids for row in again] == [row.prompt_ids for row in loaded]


def test_wrong_tools_name_row_and_flag(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "t.parquet", {"prompt": "q", "reward_model": 1, "tools": "search"})
    with pytest.raises(ValueError, match=r"row 0 of .*, column 'tools' \(--tool-key\), found 'search'"):
        load(path, tokenizer, "--apply-chat-template", "--tool-key", "tools")


def test_a_prompt_that_cannot_be_encoded_names_file_row_and_column(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "fine", "reward_model": "Par\\ud835is"}\n{"prompt": "Par\\ud835is", "reward_model": 1}')
    (row,) = load(f"{path}@[:1]", tokenizer)
    assert row.label == "Par\ud835is"
    for flags in ([], ["--apply-chat-template"]):
        with pytest.raises(
            ValueError, match=r"row 1 of .*t.jsonl, column 'prompt' .*lone surrogate '\\ud835'"
        ) as error:
            load(str(path), tokenizer, *flags)
        str(error.value).encode()


def test_a_row_knows_its_file(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "t.parquet", *({"prompt": f"p{i}", "reward_model": i} for i in range(4)))
    assert [(row.file, row.index) for row in load(f"{path}@[-2:]", tokenizer)] == [(path, 2), (path, 3)]


def test_other_columns_are_not_read(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def spy(path: str, columns: set[str], limit: int | None = None, **names: str) -> Records:
        asked.append((columns, limit))
        return read_records(path, columns, limit)

    monkeypatch.setattr("sleuth.data.prompts.read_records", spy)
    row = {"prompt": "q", "reward_model": 1, "info": {"a": 1}, "unused": "x", "tools": None}
    path = write(tmp_path / "t.parquet", row)
    load(path, tokenizer, "--metadata-key", "info", "--tool-key", "tools", "--apply-chat-template")
    check_rows(path, make_args(path), tokenizer)
    assert asked == [
        ({"prompt", "reward_model", "info", "tools", "data_source"}, None),
        ({"prompt", "reward_model", "metadata", "data_source"}, 16),
    ]


def test_a_look_finds_a_key_that_only_later_rows_have(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    row = {"prompt": "q", "reward_model": 1}
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, [*[row] * 20, row | {"tools": [{"name": "search"}]}])))
    check_rows(str(path), make_args(str(path), "--tool-key", "tools", "--apply-chat-template"), tokenizer)
    with pytest.raises(ValueError, match=r"expected a column 'calls' \(--tool-key\)"):
        check_rows(str(path), make_args(str(path), "--tool-key", "calls", "--apply-chat-template"), tokenizer)


def test_rows_without_an_answer_are_counted_and_told(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.jsonl"
    labels = ["a", None, "b", *[{"target": []}] * 7]
    path.write_text("\n".join(json.dumps({"prompt": "q", "reward_model": label}) for label in labels))
    assert len(load(str(path), tokenizer)) == 10
    assert "8 of 10 rows have no answer in their label, column 'reward_model' (rows 1, 3, 4, 5, 6, ...)" in caplog.text
    caplog.clear()
    load(f"{path}@[:1]", tokenizer)
    assert caplog.text == ""


def test_a_template_is_put_around_bare_questions(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "t.parquet", {"prompt": "Who {wrote} it?", "reward_model": "Ann"})
    (tmp_path / "mine.txt").write_text("Search first. Question: {question}\n")
    flags = ("--prompt-template", str(tmp_path / "mine.txt"), "--apply-chat-template")
    for evaluation in (False, True):
        (row,) = load(path, tokenizer, *flags, evaluation=evaluation)
        assert tokenizer.decode(row.prompt_ids) == RENDERED.format("Search first. Question: Who {wrote} it?")
        assert row.prompt == "Search first. Question: Who {wrote} it?"
    messages = write(tmp_path / "m.parquet", SEARCH_R1_ROW)
    with pytest.raises(ValueError, match=r"expects a bare question, .* column 'prompt' \(--input-key\); found a list"):
        load(messages, tokenizer, *flags)
    (row,) = load(messages, tokenizer, *flags, "--input-key", "question")
    assert row.prompt == "Search first. Question: total number of death row inmates in the us?"
