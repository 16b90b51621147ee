"""The warm-up's trajectories: what the search conversation would hold, of training questions alone."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from qa_em_format import em_check, score_response
from tools.smollm2 import make_trajectories
from tools.smollm2.make_trajectories import OBSERVATION_TOKENS, ROOT, searched_name

MODEL = ROOT / "data/demo/model"


def test_every_trajectory_earns_the_full_reward_and_is_of_a_training_question(tmp_path: Path) -> None:
    out = tmp_path / "trajectories.jsonl.gz"
    assert make_trajectories.main(["--model", str(MODEL), "--count", "40", "--out", str(out)]) == 0
    lines = gzip.decompress(out.read_bytes()).decode().splitlines()
    rows = [json.loads(line)["segments"] for line in lines]
    assert len(rows) == 40
    answers = {
        row["question"]: row["golden_answers"] for row in pq.read_table(ROOT / "data/demo/train.parquet").to_pylist()
    }
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for prompt, search, observation, answer in rows:
        question = next(question for question in answers if question in prompt["text"])
        segments = [("model", search["text"]), ("observation", observation["text"]), ("model", answer["text"])]
        assert score_response(segments, {"target": answers[question]}).reward == 1.0
        assert len(tokenizer(observation["text"])["input_ids"]) <= OBSERVATION_TOKENS
        assert [part["weight"] for part in (prompt, search, observation, answer)] == [0.0, 1.0, 0.0, 1.0]
        assert not em_check(prompt["text"], answers[question])


def test_more_than_there_are_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(MODEL), "--count", "9999", "--out", str(tmp_path / "x.gz")]
    with pytest.raises(SystemExit):
        make_trajectories.main(flags)
    assert "--count 9999: expected at most 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("In what year was Max Planck born?", "Max Planck"),
        ("In what year did the person who wrote the novel Emma die?", "the person who wrote the novel Emma"),
        ("Who composed the opera Carmen?", "Carmen"),
        ("From what year is the film The Third Man?", "The Third Man"),
        ("Why?", None),
    ],
)
def test_the_name_in_a_question(question: str, name: str | None) -> None:
    assert searched_name(question) == name
