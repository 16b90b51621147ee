"""The real trainer on a fake GPU: the plan's formulas say what it takes, lending frees it, nothing waits a layer long.

Models have their real widths and six layers; the formulas are linear in layers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from sleuth.arguments import check_model, parse_args, read_hf_config
from sleuth.memory_plan import MemoryPlan, memory_plan
from tests.fake_cuda.rank import LAYERS
from tests.published_configs import PUBLISHED
from tools.gpu_checks.size import SIZES, compare_memory, plan_of
from tools.gpu_checks.trainer import Settings, read_shape

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="guard.cpp needs a compiler"),
]

ROOT = Path(__file__).resolve().parents[2]
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
CASES = {
    "3B, TP2 x DP2, recompute": ("qwen2.5-3B", 0, 4, 9216, f"{TP2} {RECOMPUTE}"),
    "3B, TP2 x DP2": ("qwen2.5-3B", 0, 4, 9216, TP2),
    "3B, alone": ("qwen2.5-3B", 0, 1, 4096, ""),
    "8B, TP4 x DP2, recompute": (
        "qwen3-8B",
        1,
        8,
        9216,
        f"--tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer {RECOMPUTE}",
    ),
    "3B, first of two stages": ("qwen2.5-3B", 0, 2, 0, "--pipeline-model-parallel-size 2"),
    "3B, last of two stages": ("qwen2.5-3B", 1, 2, 0, "--pipeline-model-parallel-size 2"),
    "30B-A3B, TP4 x EP8": (
        "qwen3-30B-A3B",
        0,
        8,
        0,
        "--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 --use-distributed-optimizer",
    ),
}
"""Model, rank, processes, tokens of a row (0: it is only built), flags."""
TRAINED = [name for name, case in CASES.items() if case[3]]
PROMISED = 1e6
"""Bytes that may stay on the device when everything is lent."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models' folders and the compiled guard."""
    place = tmp_path_factory.mktemp("fake_cuda")
    for name, config in PUBLISHED.items():
        (place / name).mkdir()
        (place / name / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
        (place / name / "tokenizer.json").write_text("{}")
    torch_folder = Path(torch.__file__).parent
    command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include"]
    command += [str(ROOT / "tests/fake_cuda/guard.cpp"), "-o", str(place / "guard.so")]
    command += [f"-L{torch_folder}/lib", f"-Wl,-rpath,{torch_folder}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True, timeout=300)
    return place


@cache
def traced(folder: Path, name: str) -> dict[str, Any]:
    model, rank, world, tokens, flags = CASES[name]
    return trace([str(folder / "guard.so"), str(folder / model), str(rank), str(world), str(tokens), *flags.split()])


def trace(words: list[str]) -> dict[str, Any]:
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.fake_cuda.rank", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def planned(folder: Path, name: str) -> MemoryPlan:
    model, _, world, tokens, flags = CASES[name]
    words = ["--hf-checkpoint", str(folder / model), "--prompt-data", "x", "--colocate", "--custom-rm-path", "a.b"]
    words += ["--actor-num-gpus-per-node", str(world), "--use-dynamic-batch-size", "--max-tokens-per-gpu"]
    args = parse_args([*words, str(tokens or 1), *flags.split()])
    return memory_plan(check_model(args, read_hf_config(args)), 80e9, 0)


@pytest.mark.parametrize("name", CASES)
def test_the_plan_says_what_the_trainer_holds(folder: Path, name: str) -> None:
    plan, found = planned(folder, name), traced(folder, name)
    assert plan.resident == pytest.approx(found["resident"], rel=0.1)
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(plan, part) == pytest.approx(found["parts"][part], rel=0.1)


@pytest.mark.parametrize("name", TRAINED)
def test_the_plan_says_what_a_step_takes(folder: Path, name: str) -> None:
    plan, found = planned(folder, name), traced(folder, name)
    peak = found["forward_backward"]["peak"]
    assert plan.peak == pytest.approx(peak, rel=0.1)
    assert plan.activations + plan.head == pytest.approx(peak - found["resident"], rel=0.1)
    assert found["step"]["peak"] < peak


@pytest.mark.parametrize("size", SIZES)
def test_the_gpu_check_expects_what_its_trainer_takes(folder: Path, size: str) -> None:
    tokens = 8192
    words = [str(folder / "guard.so"), size, "0", "1", str(tokens)]
    found = trace(words)
    script, changes = SIZES[size]
    flags = read_shape(script)[1] | {"num_layers": LAYERS}
    plan = plan_of(Settings(**changes), flags, tokens)
    result = compare_memory(size, found["resident"], found["forward_backward"]["peak"], plan, tokens)
    assert result.status == "ok", result.found
    assert compare_memory(size, found["resident"], 0.8 * plan.peak, plan, tokens).status == "failed"


@pytest.mark.parametrize("name", CASES)
def test_lending_leaves_nothing_and_brings_back_everything(folder: Path, name: str) -> None:
    found = traced(folder, name)
    assert found["lent"] <= PROMISED
    assert found["back"] == found["resident"]


@pytest.mark.parametrize("name", TRAINED)
def test_nothing_waits_for_the_device_in_a_layer_or_for_a_parameter(folder: Path, name: str) -> None:
    found = traced(folder, name)
    assert found["forward_backward"]["waits"] == {}
    assert list(found["step"]["waits"].values()) == [1]  # for the gradient's norm, by which it is clipped


@pytest.mark.parametrize("name", TRAINED)
def test_attention_is_one_kernel_a_layer_forward_and_one_backward(folder: Path, name: str) -> None:
    passes = 2 if "recompute" in name else 1
    calls = traced(folder, name)["forward_backward"]["attention"]
    assert calls == {"_varlen_attn": passes * LAYERS, "_varlen_attn_backward": LAYERS}
