"""Secrets that are planted in every place for them are in nothing that a run writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.runs import run_training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PLANTED = "Pl4nted-hunter2"


def test_planted_secrets_are_in_no_file_and_not_on_the_console(
    tmp_path: Path, search_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", f"{PLANTED}-key")
    monkeypatch.setenv("HTTP_PROXY", f"http://bob:{PLANTED}@127.0.0.1:9")
    config = tmp_path / "mine.yaml"
    config.write_text(
        f"custom: {{auth: {PLANTED}, credentials: {{user: alice, pin: {PLANTED}-pin}}, key: env:JUDGE_API_KEY,"
        f" proxy: 'http://bob:{PLANTED}@127.0.0.1:9'}}\n"
        "search_r1: {topk: 1, max_turns: 2, max_observation_tokens: 48}\n"
    )
    code, output = run_training(
        [
            *("--hf-checkpoint", str(MODEL), "--prompt-data", "data/demo/train.parquet", "--apply-chat-template"),
            *("--custom-config-path", str(config), "--custom-rm-path", "generate_with_search.reward_func"),
            *("--custom-generate-function-path", "tests.e2e.leaky_hooks.generate"),
            *("--search-url", search_url.replace("http://", f"http://alice:{PLANTED}@")),
            *("--num-rollout", "1", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"),
            *("--rollout-max-response-len", "48", "--rollout-max-context-len", "512", "--rollout-num-gpus", "1"),
            *("--debug-rollout-only", "--use-tensorboard", "--max-failure-rate", "0.5"),
            *("--run-dir", str(tmp_path / "run")),
        ]
    )
    assert code == 0, output
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [path for path in files if b"Pl4nted" in path.read_bytes()] == []
    assert "Pl4nted" not in output
    # They were there to be written: each place tells of them in its own way.
    assert "http://***@127.0.0.1" in (tmp_path / "run/config.yaml").read_text()
    assert "asking with ***" in output
    assert "RuntimeError: 401 from http://***@judge" in (tmp_path / "run/logs/rollout.log").read_text()
    trajectories = "".join(path.read_text() for path in (tmp_path / "run/trajectories").glob("*.jsonl"))
    assert '"asked_with": "***"' in trajectories
