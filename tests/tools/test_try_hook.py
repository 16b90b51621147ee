"""Hooks are tried with scripted turns in this process, and with a real engine as a user types it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sleuth.arguments import parse_args
from tools.try_hook import TryArgs, main, read_scripts

ROOT = Path(__file__).resolve().parents[2]
DATA = str(ROOT / "data/demo/train.parquet")
CALCULATOR = ["--custom-generate-function-path", "examples.calculator.generate"]
SCORED = [*CALCULATOR, "--custom-rm-path", "examples.calculator.reward_func"]
TURNS = ["<calc>12 * 7</calc>", "84"]
BROKEN = """
from sleuth.hooks import Conversation, FailSample, SampleStatus, StopReason, StopRunError


async def generate(args, sample, sampling_params):
    conversation = Conversation(args, sample, sampling_params)
    await conversation.turn()
    sample.report(words=2, draft="a note")
    return pick(conversation, sample)


def pick(conversation, sample):
    if sample.index == 1:
        return [][7]
    return conversation.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)


async def reward_func(args, sample, **kwargs):
    if sample.index == 2:
        raise FailSample("judge_busy", "the judge answered 503")
    if sample.index == 3:
        raise StopRunError("the judge is gone")
    return {"reward": 0.5, "style": 0.25}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the command is typed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def script(folder: Path, turns: object) -> list[str]:
    (folder / "answers.yaml").write_text(yaml.safe_dump(turns))
    return ["--prompt-data", DATA, "--apply-chat-template", "--scripted", "answers.yaml"]


def test_a_trajectory_is_shown_with_its_masks_and_reward(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SCORED, *script(folder, TURNS), "--rows", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("Sample ") == 2
    assert "(row 1 of train.parquet): reward 0, completed (answered)" in out
    assert "trained on, mean log-prob" in out
    assert "observation, 11 tokens, not trained on" in out
    assert "<result>84</result>" in out
    assert "Reward: 0 (exact_match 0)" in out
    assert "trajectories: 2, failed: 0, mean reward: 0.000" in out


def test_each_row_may_have_turns_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CALCULATOR, *script(folder, [["one"], ["<calc>1 + 1</calc>", "two"], ["three"]])]) == 0
    out = capsys.readouterr().out
    assert out.count("Sample ") == 3
    assert "<result>2</result>" in out
    assert "(no --custom-rm-path: nothing is scored)" in out


def test_errors_come_with_their_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "broken_hook.py").write_text(BROKEN)
    hooks = ["--custom-generate-function-path", "broken_hook.generate", "--custom-rm-path", "broken_hook.reward_func"]
    assert main([*hooks, *script(folder, ["hello"])]) == 1
    out = capsys.readouterr().out
    assert "Error: generate hook broken_hook.generate: IndexError: list index out of range (broken_hook.py:14)" in out
    trace = out[out.index("  File ") : out.index("IndexError: list index out of range\n")]
    assert trace.count("  File ") == 2
    assert 'broken_hook.py", line 9, in generate' in trace
    assert "return [][7]" in trace
    assert "failed (judge_busy)" in out
    assert "the judge answered 503" in out
    assert "this would end a run: the judge is gone" in out
    assert "Counts: words 2" in out
    assert "draft: a note" in out
    assert "Reward: 0.5 (style 0.25)" in out
    assert "trajectories: 4, failed: 3, mean reward: 0.500" in out


def test_a_script_that_is_too_short_is_told_at_the_line_that_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SCORED, *script(folder, TURNS[:1]), "--rows", "1"]) == 1
    out = capsys.readouterr().out
    assert "the script has 1 turns; the hook asked for one more (calculator.py:" in out


def test_a_hook_that_hangs_is_told_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "slow_hook.py").write_text(
        "import asyncio\nasync def generate(args, sample, sampling_params):\n    await asyncio.sleep(60)\n"
    )
    flags = ["--custom-generate-function-path", "slow_hook.generate", "--hook-timeout", "0.1", "--rows", "1"]
    assert main([*flags, *script(folder, ["x"])]) == 1
    out = capsys.readouterr().out
    assert "failed (hook_timeout)" in out
    assert "no result within --hook-timeout 0.1 s (slow_hook.py:3)" in out


def test_the_flags_of_a_run_are_taken_and_their_checkpoints_not_asked_for(folder: Path) -> None:
    run = "--colocate --num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 4 --global-batch-size 16 --lr 1e-5"
    files = "--ref-load not_here --save not_here --load not_here --use-kl-loss"
    assert main([*SCORED, *script(folder, TURNS), "--rows", "1", *run.split(), *files.split()]) == 0
    assert list(folder.iterdir()) == [folder / "answers.yaml"]  # nothing was written


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rowz", "3"], "wrong argument: --rowz: unknown; did you mean --rows?"),
        (["--prompt-data", "nowhere.parquet"], "expected a parquet or JSONL file, found none at nowhere.parquet"),
        (["--custom-rm-path", "nowhere.reward"], "looked for module nowhere in"),
        (["--hf-checkpoint", "no_model"], "expected a model's folder with config.json, found none at no_model"),
        (["--engine-url", "http://127.0.0.1:9"], "expected --scripted or --engine-url, found both"),
        (["--rows", "5"], "expected a list for each of 5 rows, found 1; lower --rows"),
        (["--loss-type", "sft"], "supervised training runs no hooks"),
        (["--label-key", "target"], "--label-key"),
    ],
)
def test_wrong_input_is_told_in_a_line(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main([*SCORED, *script(folder, [TURNS]), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: b", "expected a list of turns, or a list of such lists, one a row, found {'a': 'b'}"),
        ("[]", "expected a list of turns"),
        ("- 84", r"found 84 \(int\); put it in quotes"),
        ("- [a]\n- b", r"found \['a'\] \(list\)"),
        ("- [a", "expected a readable YAML file"),
    ],
)
def test_a_script_that_says_nothing(folder: Path, text: str, message: str) -> None:
    (folder / "wrong.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_scripts(folder / "wrong.yaml", None)


def test_a_script_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"found nowhere.yaml .*No such file"):
        read_scripts(Path("nowhere.yaml"), None)


def test_few_flags_suffice() -> None:
    args = parse_args(["--prompt-data", DATA], model=TryArgs)
    assert (args.rows, args.hf_checkpoint) == (None, str(ROOT / "data/demo/model"))


def test_an_engine_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt-data", DATA, "--apply-chat-template", "--engine-url", "http://127.0.0.1:9"]
    assert main([*SCORED, *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "http://127.0.0.1:9/generate cannot be reached" in error


@pytest.mark.engine
def test_with_a_running_engine(engine, capsys: pytest.CaptureFixture[str]) -> None:
    (Path("rows.jsonl")).write_text('{"prompt": "one two three", "reward_model": "4"}\n' * 3)
    flags = ["--hf-checkpoint", str(engine.model_path), "--prompt-data", "rows.jsonl", "--engine-url", engine.url]
    assert main([*SCORED, *flags, "--rollout-max-response-len", "8"]) == 0
    out = capsys.readouterr().out
    assert out.count("trained on, mean log-prob") == 3
    assert "trajectories: 3, failed: 0" in out


@pytest.mark.engine
def test_with_an_engine_of_its_own(folder: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/try_hook.py"), *SCORED, "--prompt-data", DATA, "--apply-chat-template"]
    done = subprocess.run(
        [*command, "--rows", "2", "--rollout-max-response-len", "16"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "starting an engine (half a minute or more)\n"
    assert "trajectories: 2, failed: 0" in done.stdout
