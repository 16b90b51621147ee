"""What the hook kit is for: a hook file is copied to a folder of one's own, gets a setting more, and is used.

The commands are typed in that folder, without PYTHONPATH: driver, rollout and trainer find the copies there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import MODEL
from tests.e2e.runs import ROOT, run_training
from tools import try_hook

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

DATA = ["--prompt-data", str(ROOT / "data/demo/train.parquet"), "--apply-chat-template"]
CALCULATOR = [
    *("--custom-generate-function-path", "my_calculator.generate"),
    *("--custom-rm-path", "my_calculator.reward_func"),
]


def copy(name: str, to: Path, *changes: tuple[str, str]) -> None:
    """A hook file under another name, with changes that each fit one place."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, f"{name}: {text.count(old)} x {old!r}"
        text = text.replace(old, new)
    to.write_text(text, encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own folder with copies of all hook files; each has a setting more and uses it."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (folder := tmp_path / "mine").mkdir()
    copy(
        "qa_em_format.py",
        folder / "my_format.py",
        ("    end_of_turn: Sequence[str] = (),\n) -> Breakdown:", "    bonus: float = 0.0,\n) -> Breakdown:"),
        ("_format_error(segments, end_of_turn)", "_format_error(segments)"),
        ("return Breakdown(reward,", "return Breakdown(reward + bonus,"),
    )
    copy(
        "generate_with_search.py",
        folder / "my_search.py",
        ("from qa_em_format import", "from my_format import"),
        ("    final_format_score: float = 0.0\n", "    final_format_score: float = 0.0\n    bonus: float = 0.0\n"),
        (
            "end_of_turn=[tokenizer.eos_token] if isinstance(tokenizer.eos_token, str) else [],",
            "bonus=settings.bonus,",
        ),
        ("sample.report(answer=result.answer,", "sample.report(bonus=settings.bonus, answer=result.answer,"),
    )
    copy(
        "mis.py",
        folder / "my_mis.py",
        (
            "    tis_batch_normalize: bool = False\n",
            "    tis_batch_normalize: bool = False\n    my_bound: float = 9.0\n",
        ),
        (
            "pg_loss * factor, 0.0), masks, metrics",
            'pg_loss * factor, 0.0), masks, metrics | {"my_bound": config.my_bound}',
        ),
    )
    copy(
        "examples/calculator.py",
        folder / "my_calculator.py",
        ("    max_calls: int = 3\n", '    max_calls: int = 3\n    opening: str = "<result>"\n'),
        ("max_calls = CalculatorSettings.of(args).max_calls", "settings = CalculatorSettings.of(args)"),
        ("conversation.turns > max_calls", "conversation.turns > settings.max_calls"),
        ('f"<result>{', 'f"{settings.opening}{'),
    )
    return folder


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_copies_of_the_search_and_the_correction_hook_with_settings_of_their_own(
    folder: Path, tmp_path: Path, flags: list[str]
) -> None:
    (folder / "mine.yaml").write_text(
        "search_r1: {bonus: 0.5}\nmis: {use_tis: true, tis_upper_bound: 3.0}\nmy_bound: 0.25\n"
    )
    own = [
        *("--custom-generate-function-path", "my_search.generate", "--custom-rm-path", "my_search.reward_func"),
        *("--custom-tis-function-path", "my_mis.compute_mis_weights_with_cp", "--custom-config-path", "mine.yaml"),
    ]
    code, output = run_training([*flags, *DATA, *own], folder)
    assert code == 0, output
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        assert line["rollout/bonus"] == 0.5
        assert line["reward/min"] >= 0.5
        assert line["rollout/searches"] > 0
        assert line["train/my_bound"] == 0.25
    saved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert (saved["mis"]["tis_upper_bound"], saved["mis"]["my_bound"]) == (3.0, 0.25)
    assert (saved["search_r1"]["bonus"], saved["search_r1"]["topk"]) == (0.5, 1)


def test_a_copy_of_the_calculator_is_tried_with_a_script(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (folder / "mine.yaml").write_text("calculator: {opening: '<outcome>', max_calls: 1}\n")
    (folder / "answers.yaml").write_text("- <calc>6 * 7</calc>\n- '42'\n")
    flags = [*CALCULATOR, *DATA, "--custom-config-path", "mine.yaml", "--scripted", "answers.yaml", "--rows", "1"]
    assert try_hook.main(flags) == 0
    assert "<outcome>42" in capsys.readouterr().out


def test_a_copy_of_the_calculator_generates_without_a_trainer(folder: Path, tmp_path: Path) -> None:
    (folder / "mine.yaml").write_text("calculator: {opening: '<outcome>', max_calls: 1}\n")
    sizes = [
        *("--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"),
        *("--global-batch-size", "8", "--rollout-max-response-len", "16"),
    ]
    model = ["--hf-checkpoint", str(MODEL), "--rollout-num-gpus", "1", "--debug-rollout-only"]
    files = ["--custom-config-path", "mine.yaml", "--run-dir", "run"]
    code, output = run_training([*CALCULATOR, *DATA, *sizes, *model, *files], folder)
    assert code == 0, output
    lines = metrics_of(folder / "run")
    assert [(line["step"], line["rollout/samples"]) for line in lines] == [(1, 8.0), (2, 8.0)]
    assert not [name for name in lines[0] if name.startswith("train/")]
    assert all("rollout/calls" in line and "reward/exact_match" in line for line in lines)
    assert (folder / "run/trajectories/step_0000002.jsonl").is_file()
    assert not list((folder / "run/logs").glob("trainer_*.log"))
