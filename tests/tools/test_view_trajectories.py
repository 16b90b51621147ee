import os

import pytest

from sleuth.metrics.trajectories import write_trajectories
from tests.metrics.samples import make_sample, word_tokenizer
from tools.view_trajectories import main


@pytest.fixture
def run(tmp_path):
    samples = [
        make_sample(0, components={"exact_match": 1.0}),
        make_sample(1, components={"exact_match": 0.0}, reward=0.0),
    ]
    for number, age in (("1", 10), ("2", 0)):
        path = tmp_path / "trajectories" / f"step_{number}.jsonl"
        write_trajectories(path, samples, word_tokenizer(), 20)
        os.utime(path, (1000 - age, 1000 - age))
    return tmp_path


def test_the_newest_trajectories_of_a_run(run, capsys):
    assert main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "step_2.jsonl: 2 trajectories" in out.replace("\n", "")
    assert "<search> book </search>" in out
    assert "observation, 2 tokens, not trained on" in out
    assert "who wrote it" in out


def test_only_wrong_ones_without_prompts(run, capsys):
    assert main([str(run / "trajectories" / "step_1.jsonl"), "--wrong", "--no-prompt"]) == 0
    out = capsys.readouterr().out
    assert "Sample 1 of prompt 0" in out
    assert "Sample 0 of prompt 0" not in out
    assert "who wrote it" not in out


def test_a_limit(run, capsys):
    assert main([str(run), "--limit", "1"]) == 0
    assert "Sample 1 of prompt 0" not in capsys.readouterr().out


def test_a_path_without_trajectories(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nothing")])
    assert "found neither" in capsys.readouterr().err
