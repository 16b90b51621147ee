"""tools/eval.py as a user types it: hooks without an engine in this process, and a real engine and retriever."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from sleuth.arguments import parse_args
from sleuth.data import PromptRow
from sleuth.metrics.trajectories import read_trajectories
from tests.tools.evaluation import hooks
from tools.eval import EvaluatedArgs, main, some_of
from tools.evaluation.models import find_model
from tools.evaluation.training import NAMES, other_settings

ROOT = Path(__file__).resolve().parents[2]
MODEL, DATA = str(ROOT / "data/demo/model"), str(ROOT / "data/demo/test.parquet")
HOOKS = "tests.tools.evaluation.hooks"
FLAGS = [
    *("--model", MODEL, "--apply-chat-template", "--eval-prompt-data", "demo", DATA, "--limit", "6"),
    *("--custom-generate-function-path", f"{HOOKS}.generate", "--custom-rm-path", f"{HOOKS}.reward"),
    *("--engine-url", "http://127.0.0.1:9", "--batch-size", "1"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder where the command is typed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    hooks.calls.clear()
    hooks.trouble.clear()
    # Tests that are started in the background may have been told to ignore ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield tmp_path
    signal.signal(signal.SIGINT, before)


def numbers(path: str = "a.json") -> dict[str, Any]:
    return json.loads(Path(path).read_text())["results"]["evaluations"]


def test_answers_and_numbers_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--output", "a.jsonl"]) == 0
    records = read_trajectories("a.jsonl")
    assert len(records) == 6
    assert len({record["row"] for record in records}) == 6
    assert max(record["row"] for record in records) > 100  # from all parts of the file
    right = sum(record["row"] % 3 == 0 for record in records) / 6
    found = numbers()["demo/greedy"]
    assert found["summary"]["all"]["measures"]["em"]["value"] == pytest.approx(right)
    assert found["metrics"]["eval/demo/greedy/em"] == pytest.approx(right)
    assert found["summary"]["all"]["measures"]["search_latency"]["value"] == 0.25
    out = capsys.readouterr().out
    assert "demo/greedy (in brackets: 95% intervals)" in out
    assert f"{right:.3f}" in out
    assert "answers: a.jsonl; numbers: a.json" in out


@pytest.mark.parametrize("order", ["in turns", "one after the other"])
@pytest.mark.parametrize("limit", [50, 51, 100, 125])
def test_a_part_of_the_rows_has_each_source_by_its_share(order: str, limit: int) -> None:
    sources = ["rare" if number % 10 == 0 else "usual" for number in range(500)]
    if order != "in turns":
        sources.sort()
    rows = [PromptRow(number, "", [], None, {"data_source": source}) for number, source in enumerate(sources)]
    chosen = some_of(rows, limit)
    assert len(chosen) == limit
    assert abs(sum(row.metadata["data_source"] == "rare" for row in chosen) - limit / 10) <= 1
    places = [row.index for row in chosen]
    assert places == sorted(places)
    assert places[0] < 100 < 400 < places[-1]
    assert some_of(rows, 500) == some_of(rows, 501) == rows


def test_an_interrupted_evaluation_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    hooks.trouble["interrupt"] = 4
    assert main([*FLAGS, "--output", "a.jsonl"]) == 130
    told = "interrupted: 3 of 6 answers are in a.jsonl; the same command goes on from there"
    assert told in capsys.readouterr().err
    hooks.calls.clear()
    hooks.trouble.clear()
    assert main([*FLAGS, "--output", "a.jsonl", "--batch-size", "4"]) == 0
    assert len(hooks.calls) == 3
    assert "going on: 3 of 6 answers are in a.jsonl" in capsys.readouterr().err
    assert len(read_trajectories("a.jsonl")) == 6
    whole = numbers()
    assert main([*FLAGS, "--output", "b.jsonl"]) == 0
    for measure in ("em", "reward", "searches"):
        there = numbers("b.json")["demo/greedy"]["summary"]
        assert whole["demo/greedy"]["summary"]["all"]["measures"][measure] == there["all"]["measures"][measure]
    hooks.calls.clear()
    assert main([*FLAGS, "--output", "a.jsonl"]) == 0
    assert hooks.calls == []
    assert "all 6 answers are in a.jsonl" in capsys.readouterr().err


def test_settings_of_the_usual_hooks_are_taken_though_no_flag_names_them() -> None:
    Path("search.yaml").write_text("search_r1: {topk: 1, max_turns: 0}\n")
    flags = ["--model", MODEL, "--eval-prompt-data", "demo", DATA, "--output", "a.jsonl"]
    args = parse_args([*flags, "--custom-config-path", "search.yaml"], model=EvaluatedArgs)
    assert args.custom_config == {"search_r1": {"topk": 1, "max_turns": 0}}


def test_an_engine_that_dies_ends_it_and_leaves_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    hooks.trouble["engine"] = 3
    assert main([*FLAGS, "--output", "a.jsonl"]) == 1
    error = capsys.readouterr().err
    assert "http://127.0.0.1:9/generate cannot be reached" in error
    assert "2 of 6 answers are in a.jsonl; the same command goes on from there" in error
    assert "results" not in json.loads(Path("a.json").read_text())
    hooks.trouble.clear()
    assert main([*FLAGS, "--output", "a.jsonl"]) == 0


def test_searches_that_fail_are_counted_also_after_a_restart(capsys: pytest.CaptureFixture[str]) -> None:
    hooks.trouble |= {"search": 2, "interrupt": 5}
    assert main([*FLAGS, "--output", "a.jsonl"]) == 130
    hooks.trouble.clear()
    assert main([*FLAGS, "--output", "a.jsonl"]) == 0
    found = numbers()["demo/greedy"]
    assert found["failed"] == 1
    assert found["summary"]["all"]["measures"]["search_success"]["value"] == pytest.approx(6 / 7)
    assert "1 trajectories failed and were generated anew" in capsys.readouterr().out


def test_several_samples_have_pass_at_k() -> None:
    assert main([*FLAGS, "--output", "a.jsonl", "--temperature", "1", "0.5", "--n-samples", "4"]) == 0
    assert len(read_trajectories("a.jsonl")) == 6 * 4 * 2
    assert list(numbers()) == ["demo/t1.0", "demo/t0.5"]
    measures = numbers()["demo/t1.0"]["summary"]["all"]["measures"]
    assert measures["pass@4"]["value"] == measures["pass@2"]["value"] == measures["em"]["value"]
    assert hooks.calls == 2 * list(range(24))


def test_the_answers_of_another_evaluation_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--output", "a.jsonl"]) == 0
    assert main([*FLAGS, "--output", "a.jsonl", "--seed", "7"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(r"found a.jsonl of another one \(sampling.seed: \d+, now 7\); name another file", error)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--limit", "0"], "--limit: expected greater than 0, found '0'"),
        (["--batchsize", "3"], "did you mean --batch-size?"),
        (["--output", "a.txt"], "--output: expected a name that ends in .jsonl, found a.txt"),
        (["--temperature", "0", "--n-samples", "2"], "greedy answers are all the same; add --temperature 1"),
        (["--model", "/nowhere/model"], "--model: expected a Hugging Face folder"),
        (["--model", "empty"], "found an empty folder at empty"),
        (["--eval-prompt-data", "demo", "nowhere.parquet"], "found none at nowhere.parquet"),
        (["--eval-prompt-data", "demo", "zero.parquet"], "zero.parquet has no rows (the file has 0)"),
        (["--eval-prompt-data", "demo"], "expected pairs NAME PATH"),
        (["--corpus", "nowhere.jsonl"], "--corpus: expected a .jsonl or .jsonl.gz file, found none at nowhere.jsonl"),
        (["--custom-rm-path", "nowhere.reward"], "looked for module nowhere in"),
        (
            ["--engine-url", "localhost:30000"],
            "--engine-url: expected an address such as http://127.0.0.1:30000, found",
        ),
        (["--output", "empty.jsonl"], "--output: expected a file that can be written, found empty.jsonl"),
        (["--output", "rows/a.jsonl"], "--output: expected a file that can be written, found rows/a.jsonl"),
        (["--label-key", "target"], "expected a column 'target' (--eval-label-key)"),
    ],
)
def test_wrong_input_is_told_in_a_line_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    (folder / "empty").mkdir()
    (folder / "empty.jsonl").mkdir()
    (folder / "rows").write_text("")
    pq.write_table(pq.read_table(DATA).slice(0, 0), folder / "zero.parquet")
    assert main([*FLAGS, "--output", "a.jsonl", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not (folder / "a.jsonl").exists()


@pytest.mark.parametrize(
    ("missing", "message"), [("--model", "--model is required"), ("--eval-prompt-data", "NAME PATH")]
)
def test_what_is_required(capsys: pytest.CaptureFixture[str], missing: str, message: str) -> None:
    given = {"--model": [MODEL], "--eval-prompt-data": ["demo", DATA], "--output": ["a.jsonl"]}
    del given[missing]
    assert main([word for name, values in given.items() for word in (name, *values)]) == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_names_the_model_it_was_trained_from(folder: Path) -> None:
    checkpoint = folder / "save/iter_0000002"
    checkpoint.mkdir(parents=True)
    (folder / "save/latest_checkpointed_iteration.txt").write_text("2")
    (checkpoint / "metadata.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config.yaml in it names none .*add --hf-checkpoint"):
        find_model("save", None)
    (checkpoint / "config.yaml").write_text("hf_checkpoint: gone\n")
    with pytest.raises(ValueError, match=r"config.yaml in it names gone, which is not here"):
        find_model("save", None)
    (checkpoint / "config.yaml").write_text(f"hf_checkpoint: {MODEL}\n")
    assert find_model("save", None) == (MODEL, Path("save"))
    assert find_model("save/iter_0000002", "other") == ("other", Path("save/iter_0000002"))


def test_other_settings_than_in_training_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder / "run/hf"
    shutil.copytree(MODEL, model)
    assert main([*FLAGS, "--model", str(model), "--output", "a.jsonl"]) == 0
    assert "trained with other settings" not in capsys.readouterr().err  # nothing is known of its training
    known = f"hf_checkpoint: {MODEL}\ncustom_generate_function_path: {HOOKS}.generate\nrollout_max_context_len: "
    (folder / "run/config.yaml").write_text(known + "512\n")
    assert main([*FLAGS, "--model", str(model), "--output", "b.jsonl"]) == 0
    said = capsys.readouterr().err
    assert "other settings than it is evaluated with: rollout_max_context_len: 512, now " in said
    assert f"--custom-config-path {model.parent / 'config.yaml'} takes those" in said
    assert main([*FLAGS, "--model", str(model), "--output", "c.jsonl", "--rollout-max-context-len", "512"]) == 0
    assert "trained with other settings" not in capsys.readouterr().err


def test_of_a_hooks_settings_those_count_that_the_model_sees(folder: Path) -> None:
    def settings(topk: int) -> Any:
        section = {"topk": topk, "search_timeout": 5.0, "local": {"search_url": f"http://127.0.0.1:{topk}/retrieve"}}
        return SimpleNamespace(load=None, custom_config={"search_r1": section}, **dict.fromkeys(NAMES))

    section = {"topk": 1, "search_timeout": 60.0, "local": {"search_url": "http://127.0.0.1:9/retrieve"}}
    (folder / "config.yaml").write_text(yaml.safe_dump({"hf_checkpoint": MODEL, "search_r1": section}))
    assert other_settings(settings(1), "hf") is None
    assert "search_r1.topk: 1, now 3; --custom-config-path config.yaml" in (other_settings(settings(3), "hf") or "")
    (folder / "config.yaml").write_text("{a: [")
    assert other_settings(settings(3), "hf") is None


def test_a_model_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="fetch it elsewhere with `hf download owner/model --local-dir FOLDER`"):
        find_model("owner/model", None)
    Path("my").mkdir()
    Path("my/model").write_text("")
    with pytest.raises(ValueError, match="found a file at my/model"):
        find_model("my/model", None)
    with pytest.raises(ValueError, match="found nothing at my/typo"):
        find_model("my/typo", None)


@pytest.mark.engine
def test_with_a_running_engine_and_its_own_retriever(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "who wrote hamlet", "reward_model": "Shakespeare", "data_source": "nq"}] * 3
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    passages = [{"id": str(i), "contents": f'"Title {i}"\nShakespeare wrote play {i}'} for i in range(5)]
    Path("corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in passages))
    flags = ["--eval-prompt-data", "mine", "rows.jsonl", "--rollout-max-response-len", "8", "--corpus", "corpus.jsonl"]
    flags += ["--model", str(engine.model_path), "--engine-url", engine.url, "--output", "a.jsonl"]
    assert main(flags) == 0
    captured = capsys.readouterr()
    assert "starting a retrieval server (bm25 over corpus.jsonl)" in captured.err
    assert "warning: the engine" not in captured.err
    assert "mine/greedy" in captured.out
    assert len(read_trajectories("a.jsonl")) == 3
    assert main(flags) == 0  # the retriever's other port makes it no other evaluation
    assert "all 3 answers are in a.jsonl" in capsys.readouterr().err


@pytest.mark.engine
def test_with_servers_of_its_own(folder: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/eval.py"), "--model", MODEL, "--eval-prompt-data", "demo", DATA]
    command += ["--apply-chat-template", "--limit", "4", "--rollout-max-response-len", "24", "--output", "a.jsonl"]
    command += ["--corpus", str(ROOT / "data/demo/corpus.jsonl.gz")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "starting an engine" in done.stderr
    assert len(read_trajectories("a.jsonl")) == 4
    assert "demo/greedy" in done.stdout
