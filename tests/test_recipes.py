"""The recipes: each plans a run that fits its GPUs, with its own model and with another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sleuth.arguments import Args, parse_args
from sleuth.plan import PlanArgs, main

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*_*.sh") if path.read_text().startswith("#!"))
CONTACT = {"WIKIPEDIA_CONTACT": "a@example.org", "DEEPSEEK_API_KEY": "k-0123456789"}


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The flags that a recipe gives to the plan in a dry run. The plan itself runs here, to import the hooks once."""
    python, words = tmp_path / "python", tmp_path / "words"
    python.write_text(f'#!/bin/sh\nshift 2\nprintf "%s\\\\0" "$@" > {words}\n')
    python.chmod(0o755)
    for name, value in CONTACT.items():
        monkeypatch.setenv(name, value)

    def flags(recipe: str, *more: str, **variables: str) -> list[str]:
        env = {"PATH": os.environ["PATH"], "PYTHON": str(python), "DRY_RUN": "1", **variables}
        command = ["bash", str(ROOT / "recipes" / recipe), *more]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return [*words.read_text().split("\0")[:-1], "--no-search-check"]

    return flags


def run_flags(words: list[str]) -> Args:
    return parse_args(words, model=PlanArgs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_plans_a_run_that_fits(planned, recipe: str, capsys: pytest.CaptureFixture[str]):
    assert main(planned(recipe)) == 0, capsys.readouterr().err


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", ["qwen2.5-0.5B", "smollm2-135M", "qwen3-30B-A3B"])
def test_another_model_brings_a_layout_that_fits(planned, recipe: str, model: str, capsys: pytest.CaptureFixture[str]):
    flags = planned(recipe, MODEL=model)
    assert main(flags) == 0, capsys.readouterr().err
    assert model in str(run_flags(flags).save)


def test_the_small_recipe_runs_on_four_and_one_gpus_or_on_four(planned):
    apart = run_flags(planned("tools_qwen3_1.7B.sh"))
    assert (apart.total_gpus, apart.num_engines, apart.colocate) == (5, 1, False)
    assert apart.update_weights_through == "distributed"
    together = run_flags(planned("tools_qwen3_1.7B.sh", COLOCATE="1"))
    assert (together.total_gpus, together.num_engines, together.colocate) == (4, 4, True)


def test_the_small_recipe_is_the_published_one(planned):
    args = run_flags(planned("tools_qwen3_1.7B.sh"))
    assert (args.num_rollout, args.rollout_batch_size, args.n_samples_per_prompt) == (500, 8, 8)
    assert (args.samples_per_step, args.optimizer_steps_per_step) == (64, 1)
    assert (args.lr, args.lr_warmup_steps, args.eps_clip, args.eps_clip_high) == (1e-6, 2, 0.2, 0.28)
    assert (args.use_kl_loss, args.save_interval, args.save_keep) == (False, 50, 3)
    assert args.eval_sets["nq_test"].endswith("@[0:500]")


def test_flags_of_the_command_line_outrank_a_recipes(planned):
    args = run_flags(planned("webagent_deepseek.sh", "--lr", "2e-6", SEARCH_BACKEND="searxng"))
    assert (args.lr, args.search_backend) == (2e-6, "searxng")


def test_a_recipe_prints_its_plan(tmp_path: Path):
    env = {**os.environ, "PYTHON": sys.executable, "DRY_RUN": "1"}
    command = ["bash", str(ROOT / "recipes/tools_qwen3_1.7B.sh"), "--no-search-check"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "5 = 4 + 1, separate" in done.stdout
    assert "generate_with_tools.reward_func" in done.stdout
