"""The check of one GPU, run on a CPU: the same code, less what needs CUDA. And it fails where it should."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from sleuth.arguments.model_scripts import known_models, read_model_script
from tools import gpu_check
from tools.gpu_checks import attention, exactness, lending
from tools.gpu_checks.trainer import MODELS, RandomTrainer, read_shape

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

ROOT = Path(gpu_check.__file__).resolve().parents[1]
ALONE = """
import importlib.abc, sys
ABSENT = "sglang ray transformers pydantic rich yaml safetensors psutil requests aiohttp orjson pyarrow".split()
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
import tools.gpu_checks.exactness, tools.gpu_checks.lending, tools.gpu_checks.ipc
import tools.gpu_checks.attention, tools.gpu_checks.size
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "tools/gpu_check.py", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550)


def test_all_of_it_on_a_cpu():
    done = run("--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    by_name = {check["name"]: check for check in summary["checks"]}
    skipped = {name for name, check in by_name.items() if check["status"] == "skipped"}
    assert skipped == {attention.ROWS, "0.5B, memory", "3B, memory"}
    assert all(by_name[name]["found"] == "needs CUDA" for name in skipped)
    assert set(by_name) - skipped == {
        *("trainer, float32", "trainer, bfloat16", "lending memory", "memory between processes"),
        *("attention, float32", "attention, bfloat16", "0.5B, speed", "3B, speed"),
    }
    assert by_name["3B, speed"]["figures"]["tokens_per_second"] > 0
    assert (summary["ok"], summary["failed"], summary["skipped"]) == (8, 0, 3)


def test_without_a_gpu_it_says_so_in_one_sentence():
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "sees no GPU, expected one" in done.stderr
    assert "--device cpu" in done.stderr


def test_a_check_that_ends_or_hangs_is_one_failed_line(capsys: pytest.CaptureFixture[str]):
    if torch.cuda.is_available():
        pytest.skip("attention on CUDA fails where there is none")
    (ended,) = gpu_check.isolated("attention", "cuda", 100.0)
    assert ended.status == "failed"
    assert ended.found.startswith("ended with exit code 1: ")
    (slow,) = gpu_check.isolated("attention", "cpu", 0.2)
    assert slow.found.startswith("took more than 0 s")
    (late,) = gpu_check.isolated("attention", "cpu", 0.0)
    assert "no time left" in late.found


def test_a_failed_check_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(gpu_check, "SECONDS", 0.0)
    assert gpu_check.main(["--device", "cpu", "--only", "ipc", "attention"]) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["ok"], summary["failed"]) == (0, 2)


def test_it_needs_torch_and_megatron_core_alone():
    command = [sys.executable, "-W", "ignore", "-c", ALONE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", [name for name in known_models() if "A3B" not in name])
def test_shapes_are_read_as_the_plan_reads_them(name: str):
    shape, flags = read_shape(name)
    expected = read_model_script(MODELS / f"{name}.sh").shape
    names = {field.name for field in dataclasses.fields(shape)} & set(expected)
    assert {key: flags[key] for key in names} == {key: expected[key] or flags[key] for key in names}


def runs(**changes: float) -> exactness.Runs:
    """What a trainer computed, in each dtype, with one quantity scaled."""
    torch.manual_seed(0)
    rows = {what: torch.randn(100) for what in exactness.TOLERANCES}
    return {dtype: {what: row * changes.get(what, 1.0) for what, row in rows.items()} for dtype in exactness.DTYPES}


@pytest.mark.parametrize("what", exactness.TOLERANCES)
@pytest.mark.parametrize("factor", [1.02, float("nan")])
def test_a_quantity_that_differs_fails(what: str, factor: float):
    assert {result.status for result in exactness.compare(runs(), runs())} == {"ok"}
    assert {result.status for result in exactness.compare(runs(**{what: factor}), runs())} == {"failed"}


def test_bfloat16_may_err_twice_as_much_as_on_the_cpu():
    exact = runs()
    on_cpu = exact | {"bfloat16": runs(gradients=1.05)["bfloat16"]}
    for factor, status in ((1.09, "ok"), (1.11, "failed")):
        ours = exact | {"bfloat16": runs(gradients=factor)["bfloat16"]}
        assert [result.status for result in exactness.compare(ours, on_cpu)] == ["ok", status]


def test_attention_that_sees_the_future_fails():
    def sees_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        parts = zip(*(x.split(attention.LENGTHS) for x in (query, key, value)), strict=True)
        attend = torch.nn.functional.scaled_dot_product_attention
        rows = [attend(*(x.transpose(0, 1) for x in part), enable_gqa=True).transpose(0, 1) for part in parts]
        return torch.cat(rows).flatten(1)

    assert attention.compare("all", sees_all, torch.float32, "cpu").status == "failed"


@pytest.fixture
def own_process_group() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.usefixtures("own_process_group")
def test_memory_that_comes_back_otherwise_fails(monkeypatch: pytest.MonkeyPatch):
    copies = lending._copies

    def other(trainer: RandomTrainer) -> list[torch.Tensor]:
        found = copies(trainer)
        found[0].view(-1)[0] += calls.pop()
        return found

    calls = [1.0, 0.0]
    monkeypatch.setattr(lending, "_copies", other)
    (result,) = lending.check("cpu", "lending")
    assert result.status == "failed"
    assert "DIFFERS" in result.found
