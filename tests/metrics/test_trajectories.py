import json

import numpy as np
import pytest

from sleuth.metrics.trajectories import (
    expected,
    read_trajectories,
    spread,
    trajectory_markdown,
    trajectory_record,
    write_trajectories,
)
from sleuth.sample import SampleStatus, StopReason
from tests.metrics.samples import make_sample, word_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


def test_a_record_shows_segments_by_source_and_what_was_trained_on(tokenizer):
    sample = make_sample(components={"exact_match": 1.0}, reported={"searches": 1.0}, source="nq")
    record = json.loads(json.dumps(trajectory_record(sample, tokenizer)))
    assert record["prompt"] == "who wrote it"
    assert record["segments"] == [
        {
            "source": "model",
            "tokens": 3,
            "trained_tokens": 3,
            "mean_log_prob": -0.2,
            "text": "<search> book </search>",
        },
        {
            "source": "observation",
            "tokens": 2,
            "trained_tokens": 0,
            "mean_log_prob": None,
            "text": "passage passage",
        },
        {
            "source": "model",
            "tokens": 3,
            "trained_tokens": 3,
            "mean_log_prob": -0.5,
            "text": "<answer> Ann </answer>",
        },
    ]
    assert record["response_ids"] == sample.trace.response_ids
    assert record["reward_components"] == {"exact_match": 1.0}


def test_labels_of_a_parquet_row_are_written(tokenizer):
    label = {
        "style": "rule",
        "ground_truth": {"target": np.array(["Ann", "Anne"], dtype=object)},
        "nan": np.float64("nan"),
    }
    record = json.loads(json.dumps(trajectory_record(make_sample(label=label), tokenizer), allow_nan=False))
    assert record["label"]["ground_truth"]["target"] == ["Ann", "Anne"]
    assert expected(record) == "Ann | Anne"


@pytest.mark.parametrize(
    ("label", "text"), [("Ann", "Ann"), ({"target": "Ann"}, "Ann"), ({"other": 1}, "{'other': 1}"), (None, "None")]
)
def test_expected_answers_of_other_labels(label, text):
    assert expected({"label": label}) == text


def test_markdown_explains_the_reward(tokenizer):
    sample = make_sample(3, 1, reward=0.2, components={"valid_format": 1.0}, reported={"searches": 1.0})
    text = trajectory_markdown(trajectory_record(sample, tokenizer))
    assert "## Sample 3 of prompt 1: reward 0.2, completed (answered)" in text
    assert "**model, 3 tokens, trained on, mean log-prob -0.20**" in text
    assert "**observation, 2 tokens, not trained on**" in text
    assert "Reward 0.2: valid_format 1, searches 1" in text


def test_markdown_says_what_was_answered_and_why_the_format_is_invalid(tokenizer):
    sample = make_sample(components={"answered": 1.0}, label="Anne")
    sample.metadata |= {"answer": "Ann", "invalid_reason": "turn 1: text after </answer>"}
    text = trajectory_markdown(json.loads(json.dumps(trajectory_record(sample, tokenizer))))
    assert "Expected: Anne\n\nAnswered: Ann\n\nInvalid format: turn 1: text after </answer>\n" in text.replace(
        "\n\n\n", "\n\n"
    )
    sample.metadata |= {"answer": None, "invalid_reason": None}
    text = trajectory_markdown(trajectory_record(sample, tokenizer))
    assert "Answered: nothing" in text
    assert "Invalid format" not in text


def test_an_answer_in_the_data_set_is_not_taken_for_the_models(tokenizer):
    sample = make_sample(components={"valid_format": 1.0})
    sample.metadata["answer"] = "the accepted one"
    record = trajectory_record(sample, tokenizer)
    assert record["answer"] is None
    assert "Answered" not in trajectory_markdown(record)


def test_markdown_of_a_failed_sample_and_of_text_with_fences(tokenizer):
    sample = make_sample(reward=None, status=SampleStatus.FAILED, reason=StopReason.SEARCH_FAILED)
    sample.error = "connection refused"
    sample.trace.append_observation([11])
    text = trajectory_markdown(trajectory_record(sample, tokenizer))
    assert "reward none, failed (search_failed)" in text
    assert "Error: connection refused" in text
    assert "````text\n```\n````" in text


def test_samples_are_spread_over_the_step():
    samples = [make_sample(i) for i in range(64)]
    assert [sample.index for sample in spread(samples, 4)] == [0, 16, 32, 48]
    assert spread(samples, 100) == samples
    assert spread(samples, 0) == []
    assert spread([], 0) == []


def test_files_for_programs_and_for_eyes(tmp_path, tokenizer):
    path = tmp_path / "trajectories" / "step_1.jsonl"
    write_trajectories(path, [make_sample(i) for i in range(8)], tokenizer, 2)
    assert [record["index"] for record in read_trajectories(path)] == [0, 4]
    assert path.with_suffix(".md").read_text().startswith("# step_1: 2 of 8 trajectories")
    assert sorted(p.name for p in path.parent.iterdir()) == ["step_1.jsonl", "step_1.md"]


def test_a_limit_of_zero_writes_nothing(tmp_path, tokenizer):
    write_trajectories(tmp_path / "t.jsonl", [make_sample()], tokenizer, 0)
    assert list(tmp_path.iterdir()) == []
