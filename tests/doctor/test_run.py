"""What the doctor says of runs: one that can start, and ones with a fault each."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sleuth.doctor import machine
from sleuth.doctor.__main__ import main
from tests.retriever.scripted import ScriptedRetriever, serving

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "data/demo/model"
FLAGS = [
    *("--hf-checkpoint", str(MODEL), "--prompt-data", str(ROOT / "data/demo/train.parquet"), "--apply-chat-template"),
    *("--custom-generate-function-path", "generate_with_search.generate"),
    *("--custom-rm-path", "generate_with_search.reward_func", "--rollout-max-context-len", "512", "--colocate"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sleuth.doctor.__main__.machine_checks", lambda: [("python", machine.python)])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


def test_a_run_that_can_start(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ScriptedRetriever()) as url:
        assert main([*FLAGS, "--search-url", f"{url}/retrieve", "--save", "save"]) == 0
    out = capsys.readouterr().out
    assert "wrong  " not in out
    assert "ok     model: config.json of " in out
    assert "ok     weights: the 50 tensors of the model are in " in out
    assert "ok     chat template: append-only" in out
    assert "ok     stop tags: '</search>' is 4 tokens" in out
    assert "columns id, question, golden_answers, data_source" in out
    assert out.count("ok     data: row ") == 3
    assert "       | <|im_start|>user" in out
    assert "ok     search: a test question was answered in " in out
    assert out.splitlines()[-1].endswith("0 note, 0 wrong")
    assert list(folder.iterdir()) == []  # nothing was written


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--search-url", "http://127.0.0.1:9/retrieve"], "wrong  search: expected the search backend local to answer"),
    ],
)
def test_a_fault_is_told_and_the_other_checks_go_on(
    capsys: pytest.CaptureFixture[str], flags: list[str], expected: str
) -> None:
    assert main([*FLAGS, *flags]) == 1
    out = capsys.readouterr().out
    assert expected in out
    assert "the check itself failed" not in out
    assert "checkpoints: " in out


def test_a_search_server_that_nobody_asks_for_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main([*FLAGS, "--search-url", "http://127.0.0.1:9/retrieve", "--no-search-check"])
    assert "ok     search: not asked (--no-search-check)" in capsys.readouterr().out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "python -m sleuth.doctor" in capsys.readouterr().out


def test_a_missing_file_of_data_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--prompt-data", "missing.parquet", "--no-search-check"]) == 1
    out = capsys.readouterr().out
    assert out.count("missing.parquet") == 1
    assert "wrong  files: files are missing --prompt-data: expected a parquet or JSONL file, found none at" in out
    assert "note   data: not looked at, since a file is missing" in out
    assert out.splitlines()[-1].endswith("1 wrong")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--lr", "abc"], "--lr: expected a valid number"),
        (["--no-such-flag", "3"], "--no-such-flag: unknown"),
        (["--global-batch-size", "7"], "--global-batch-size"),
    ],
)
def test_wrong_flags_keep_nobody_from_a_look_at_the_rest(
    capsys: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    assert main([*FLAGS, "--no-search-check", *flags]) == 2
    out = capsys.readouterr().out
    assert out.startswith("wrong  flags: wrong argument\n")
    assert told in out
    assert "  The run is looked at without them." in out
    assert "ok     model: config.json of " in out
    assert "ok     data: row 0" in out
    assert "the check itself failed" not in out


def test_without_a_needed_flag_only_the_machine_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prompt-data", "x.parquet"]) == 2
    out = capsys.readouterr().out
    assert "--hf-checkpoint is required" in out
    assert "  The run is looked at when they are right." in out
    assert out.splitlines()[-1] == "1 ok, 0 note, 1 wrong"


def test_a_damaged_tokenizer_is_told_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(FLAGS[FLAGS.index("--hf-checkpoint") + 1])
    for file in source.iterdir():
        shutil.copy(file, folder)
    (folder / "tokenizer.json").write_text("{")
    assert main([*FLAGS, "--hf-checkpoint", str(folder)]) == 1
    out = capsys.readouterr().out
    assert out.count(f"expected a tokenizer in {folder} that can be loaded") == 1
    assert "wrong  data: not looked at, since the tokenizer cannot be loaded" in out
