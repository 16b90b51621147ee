"""`run_demo.sh --protocol tools`: the whole loop with tool calls, by the script that people type."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from sleuth.metrics.trajectories import read_trajectories
from tests.e2e.runs import ROOT, RUN_SECONDS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


def test_the_demo_runs_with_tool_calls(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    sizes = ["--steps", "3", "--questions", "8", "--run-dir", str(run_dir)]
    # Set up by whoever runs the tests: the script takes the environment that is there.
    command = ["bash", str(ROOT / "run_demo.sh"), "--protocol", "tools", *sizes]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr

    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines[1:]:
        assert line["rollout/tool_calls"] > 0
        assert line["rollout/searches"] > 0
        assert line["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert lines[1]["reward/answered"] > 0.5

    results = calls = 0
    for path in (run_dir / "trajectories").glob("step_*.jsonl"):
        for record in read_trajectories(path):
            segments = record["segments"]
            for segment in segments:
                assert segment["trained_tokens"] == (segment["tokens"] if segment["source"] == "model" else 0)
            calls += any("<tool_call>" in s["text"] for s in segments if s["source"] == "model")
            observed = [s["text"] for s in segments if s["source"] == "observation"]
            results += any(text.startswith("\n<|im_start|>tool\n[1] ") for text in observed)
    assert calls >= results > 0
    assert (run_dir / "hf/chat_template.jinja").read_text() == (
        ROOT / "data/demo/model_tools/chat_template.jinja"
    ).read_text()
    assert (run_dir / "hf/model.safetensors").is_file()
