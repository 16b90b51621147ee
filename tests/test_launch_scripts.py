"""The shell scripts: what is planned for the models they name, dry runs, and what is stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from sleuth.arguments import parse_args
from sleuth.cluster.preflight import with_model
from sleuth.memory_plan import gpu_bytes, memory_plan, num_parameters
from sleuth.plan import PlanArgs, main, micro_batches
from tests.published_configs import PUBLISHED

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "run_qwen2.5_3B.sh"
HOOKS = """
async def generate(args, sample, sampling_params, evaluation=False): ...
async def reward_func(args, sample, **kwargs): ...
"""


def environment(**variables: str) -> dict[str, str]:
    """Nothing of the test's own environment that the script reads."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return {**kept, "PYTHON": sys.executable, "DRY_RUN": "1", **variables}


def dry_run(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *flags]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=120)


@pytest.fixture
def hooks(tmp_path: Path) -> dict[str, str]:
    """A folder with stand-ins for the search hooks, so that a dry run takes no heavy imports."""
    (tmp_path / "stand_in.py").write_text(HOOKS)
    return {"PYTHONPATH": str(tmp_path)}


STAND_IN = ("--custom-generate-function-path", "stand_in.generate", "--custom-rm-path", "stand_in.reward_func")


# Parameters in billions, as the models' cards state them.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2.5-0.5B", 0.49),
        ("qwen2.5-1.5B", 1.54),
        ("qwen2.5-3B", 3.09),
        ("qwen2.5-7B", 7.62),
        ("qwen3-0.6B", 0.6),
        ("smollm2-135M", 0.135),
        ("qwen3-1.7B", 1.72),
        ("qwen3-4B", 4.02),
        ("qwen3-8B", 8.19),
        ("qwen3-30B-A3B", 30.53),
    ],
)
def test_number_of_parameters(name: str, billions: float):
    assert num_parameters(plan_args(name)) / 1e9 == pytest.approx(billions, abs=0.01)


def plan_args(name: str, *flags: str) -> PlanArgs:
    base = [
        "--hf-checkpoint",
        f"models/{name}",
        "--prompt-data",
        "x.parquet",
        "--custom-rm-path",
        "stand_in.reward_func",
    ]
    return with_model(parse_args([*base, "--colocate", *flags], model=PlanArgs), planning=True)


def test_memory_of_the_3b_model_on_four_gpus():
    layout = "--actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 --rollout-num-gpus-per-engine 1"
    plan = memory_plan(plan_args("qwen2.5-3B", *layout.split(), "--use-distributed-optimizer"), 80e9, 4096)
    assert [round(x / 1e9, 1) for x in (plan.weights, plan.gradients, plan.optimizer)] == [3.1, 6.2, 9.3]
    assert plan.kv_per_token == 36 * 1024
    assert plan.kv_tokens == int((0.7 * 80e9 - plan.engine_weights) / (36 * 1024))


def test_experts_are_spread_over_expert_parallel_ranks():
    ranks = ["--actor-num-gpus-per-node", "8", "--use-distributed-optimizer"]
    whole, spread = (
        memory_plan(plan_args("qwen3-30B-A3B", *ranks, *flags), 80e9, 4096)
        for flags in ([], ["--expert-model-parallel-size", "8"])
    )
    experts = 48 * 128 * 3 * 2048 * 768
    assert whole.weights - spread.weights == pytest.approx(2 * experts * 7 / 8)
    assert spread.optimizer == pytest.approx(whole.optimizer)  # spread over all ranks either way


def test_recomputation_and_sequence_parallelism_save_activations():
    tensor = ["--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"]
    full = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    plain, sequence, both = (
        memory_plan(plan_args("qwen2.5-3B", *tensor, *flags), 80e9, 4096).activations
        for flags in ([], ["--sequence-parallel"], ["--sequence-parallel", *full])
    )
    assert plain > sequence > 5 * both


def test_micro_batches():
    ranks = ["--actor-num-gpus-per-node", "2"]
    dynamic = plan_args("qwen2.5-3B", *ranks, "--use-dynamic-batch-size")
    assert micro_batches(dynamic, 1024) == 15  # 128 samples, 9 to a batch of 9216 tokens
    assert micro_batches(dynamic, 20000) == 128
    assert micro_batches(plan_args("qwen2.5-3B", *ranks, "--micro-batch-size", "4"), 1024) == 32


def test_dry_run_prints_the_plan(hooks: dict[str, str], tmp_path: Path):
    result = dry_run(*STAND_IN, **hooks, RUN_DIR=str(tmp_path / "run"))
    assert result.returncode == 0, result.stderr
    for part in (
        "4 = max(4, 4), colocated",
        "2 x 1 x 1 x 2 = 4 GPUs",
        "2 x 2 GPUs",
        "32 prompts x 8 samples = 256",
        "256 / global batch 256 = 1",
        "every 20 steps",
        "stand_in.reward_func",
    ):
        assert part in result.stdout, result.stdout
    assert not (tmp_path / "run").exists()


def test_dry_run_of_another_model_with_tis_and_wandb(hooks: dict[str, str]):
    result = dry_run(*STAND_IN, **hooks, MODEL="qwen3-1.7B", USE_TIS="1", WANDB_API_KEY="secret-key")
    assert result.returncode == 0, result.stderr
    assert "1.72 billion" in result.stdout
    assert "secret-key" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--global-batch-size", "100"], ["--global-batch-size 100 must divide the 256 samples", "64 and 128"]),
        (["--custom-rm-path", "stand_in.reward_fun"], ["looked for reward_fun in", "did you mean reward_func?"]),
        (["--rolout-temperature", "1"], ["did you mean --rollout-temperature?"]),
        (["--num-layers", "24"], ["the flag says 24", "says 36"]),
        (["--tensor-model-parallel-size", "4"], ["must divide --num-query-groups 2"]),
        (["--hf-checkpoint", "some-model"], ["found some-model"]),
    ],
)
def test_dry_run_refuses_what_cannot_work(hooks: dict[str, str], flags: list[str], parts: list[str]):
    result = dry_run(*STAND_IN, *flags, **hooks)
    assert result.returncode == 2
    assert all(part in result.stderr for part in parts), result.stderr


def test_more_gpus_than_there_are_are_refused(hooks: dict[str, str]):
    result = dry_run(*STAND_IN, **hooks, NUM_GPUS="2")
    assert result.returncode == 2
    assert "expected at most the 2 GPUs that there are (NUM_GPUS" in result.stderr
    assert "4 = max(4, 4), colocated" in result.stderr


def test_data_may_be_on_the_hub_or_here(hooks: dict[str, str], tmp_path: Path):
    hub = dry_run(*STAND_IN, **hooks, TRAIN_DATA="someone/some_set", EVAL_DATA="someone/some_set@v1/a.jsonl@[0:9]")
    assert hub.returncode == 0, hub.stderr
    assert "prompt-data" not in hub.stdout
    for local in ("set/train.parquet", "data/set/train.parquet@[0:9]", str(tmp_path / "a.parquet")):
        found = dry_run(*STAND_IN, **hooks, TRAIN_DATA=local, EVAL_DATA="someone/some_set")
        place = local.removesuffix("@[0:9]") if local.startswith("/") else ROOT / local.removesuffix("@[0:9]")
        assert f"--prompt-data: expected a parquet or JSONL file, found none at {place}" in found.stdout + found.stderr


def test_an_unknown_model_is_refused():
    result = dry_run(MODEL="qwen9")
    assert result.returncode == 2
    names = "qwen2.5-0.5B qwen2.5-1.5B qwen2.5-3B qwen2.5-7B qwen3-0.6B qwen3-1.7B qwen3-30B-A3B qwen3-4B qwen3-8B"
    assert f"expected one of {names} smollm2-135M (the files of scripts/models/), found 'qwen9'" in result.stderr


def test_missing_files_stop_a_real_run_before_ray_starts(hooks: dict[str, str], tmp_path: Path):
    run_dir = tmp_path / "run"
    result = dry_run(*STAND_IN, **hooks, DRY_RUN="0", RUN_DIR=str(run_dir), TRAIN_DATA=str(tmp_path / "no.parquet"))
    assert result.returncode == 2
    assert f"found none at {tmp_path / 'no.parquet'}" in result.stderr
    assert not (run_dir / "ray.log").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "x"], "--steps: expected a whole number from 1 on, found 'x'"),
        (["--questions", "0"], "--questions: expected a whole number from 1 on, found '0'"),
        (["--seed", "-1"], "--seed: expected a whole number, found '-1'"),
        (["--run-dir"], "--run-dir needs a value"),
        (["--bogus"], "unknown option: --bogus"),
    ],
)
@pytest.mark.parametrize("script", ["run_demo.sh", "run_smollm2.sh"])
def test_a_script_refuses_wrong_options_before_anything_starts(
    script: str, options: list[str], message: str, tmp_path: Path
):
    assert refusal(script, options, tmp_path) == message


def test_the_demo_refuses_a_folder_of_another_run(tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "metrics.jsonl").touch()
    message = f"--run-dir: expected a new or empty folder, found files in {tmp_path}/full; name another"
    assert refusal("run_demo.sh", ["--run-dir", "full"], tmp_path) == message


def test_the_demo_refuses_a_protocol_that_it_does_not_have(tmp_path: Path):
    message = "--protocol: expected tags or tools, found 'xml'"
    assert refusal("run_demo.sh", ["--protocol", "xml"], tmp_path) == message
    assert refusal("run_smollm2.sh", ["--protocol", "tags"], tmp_path) == "unknown option: --protocol"


def refusal(script: str, options: list[str], folder: Path) -> str:
    command = ["bash", str(ROOT / script), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    return done.stderr.splitlines()[0]


MODELS = sorted(path.stem for path in (ROOT / "scripts/models").glob("*.sh"))


@pytest.mark.parametrize("model", MODELS)
def test_every_model_fits_eight_gpus_of_80_gb(hooks: dict[str, str], model: str):
    result = dry_run(*STAND_IN, **hooks, MODEL=model)
    assert result.returncode == 0, result.stderr
    assert "Memory per GPU, of 84.9 GB" in result.stdout


SHARED_GPU = ["--prompt-data", "x.parquet", "--colocate", "--custom-rm-path", "tests.test_launch_scripts.reward"]


def test_what_does_not_fit_is_refused_with_flags_that_make_it_fit(capsys: pytest.CaptureFixture[str]):
    gpus = ["--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "4", "--rollout-max-context-len", "8192"]
    flags = ["--hf-checkpoint", "Qwen2.5-7B", *SHARED_GPU, *gpus]
    assert main(flags) == 2
    message = capsys.readouterr().err
    assert re.search(r"^memory: training takes \d+\.\d GB, expected at most the 84\.9 GB of a GPU", message)
    remedy = message.partition("it would fit with ")[2].split()
    assert remedy[0].startswith("--")
    assert main([*flags, *remedy]) == 0
    assert main([*flags, "--gpu-memory", "141"]) == 2  # Adam alone takes 91 GB without --use-distributed-optimizer
    assert main([*flags, "--gpu-memory", "210"]) == 0


def test_memory_that_engines_do_not_leave_is_refused(capsys: pytest.CaptureFixture[str]):
    flags = ["--hf-checkpoint", "Qwen2.5-0.5B", *SHARED_GPU, "--rollout-max-context-len", "4096"]
    assert main([*flags, "--sglang-mem-fraction-static", "0.97"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("memory: generating takes 87.9 GB")
    assert "it would fit with --sglang-mem-fraction-static 0.7" in message
    assert main([*flags, "--sglang-mem-fraction-static", "0.011"]) == 2
    assert "an engine's KV cache has room for" in capsys.readouterr().err


def test_what_fits_only_with_shorter_trajectories_says_so(capsys: pytest.CaptureFixture[str]):
    flags = [
        "--hf-checkpoint",
        "Qwen2.5-1.5B",
        *SHARED_GPU,
        "--actor-num-gpus-per-node",
        "4",
        "--rollout-num-gpus",
        "4",
    ]
    flags += ["--use-distributed-optimizer", "--gpu-memory", "24"]
    assert main(flags) == 2
    remedy = capsys.readouterr().err.partition("cut trajectories short: it would fit with ")[2].split()
    assert remedy[0] == "--rollout-max-context-len"
    assert main([*flags, *remedy]) == 0


def test_a_run_that_no_flag_makes_fit_needs_more_gpus(capsys: pytest.CaptureFixture[str]):
    assert main(["--hf-checkpoint", "Qwen3-30B-A3B", *SHARED_GPU]) == 2
    assert "use more GPUs, or larger ones" in capsys.readouterr().err


def test_sizes_of_gpus_are_those_that_cuda_finds():
    assert [gpu_bytes(size) / 1e9 for size in (24, 80, 80.5, 141)] == [24, 84.9, 80.5, 150.0]


def test_disk_that_checkpoints_need(hooks: dict[str, str]):
    result = dry_run(*STAND_IN, **hooks)
    assert "4 x 43.2 = 172.8 GB at most" in result.stdout  # 3 are kept, and a fourth is being written
    assert "1 x 43.2" in dry_run(*STAND_IN, "--num-rollout", "5", **hooks).stdout


async def reward(args: object, sample: object, **kwargs: object) -> float:
    return 0.0


def test_a_plan_without_the_model_names_the_script_that_it_reads(capsys: pytest.CaptureFixture[str]):
    flags = ["--hf-checkpoint", "models/Qwen2.5-7B", *SHARED_GPU, "--gpu-memory", "2000"]
    assert main(flags) == 0
    assert "scripts/models/qwen2.5-7B.sh (the model is not here yet)" in capsys.readouterr().out
    assert main([*flags, "--num-layers", "35"]) == 2
    assert "the flag says 35, scripts/models/qwen2.5-7B.sh says 28" in capsys.readouterr().err


def test_the_plan_reads_a_models_own_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen2.5-3B"]))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["--hf-checkpoint", str(tmp_path), *SHARED_GPU, "--gpu-memory", "300"]) == 0
    out = capsys.readouterr().out
    assert "config.json" in "".join(out.split())  # a long path is wrapped
    assert "3.09 billion" in out


@pytest.fixture
def stand_in_python(tmp_path: Path) -> Path:
    """Python, but train.py prints what it was given and sleeps, and plans are skipped."""
    path = tmp_path / "python"
    path.write_text(
        "#!/usr/bin/env bash\n"
        'case "$*" in *sleuth.plan*) exit 0 ;;\n'
        f'*{ROOT}/train.py*) printf "job got: %s\\n" "$@"; exec sleep 612 ;; esac\n'
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    path.chmod(0o755)
    return path


def test_several_nodes_train_and_generate_on_all_their_gpus(hooks: dict[str, str]):
    result = dry_run(*STAND_IN, **hooks, NUM_NODES="2", NUM_GPUS="8")
    assert result.returncode == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert "16 = max(16, 16), colocated" in text
    assert "Nodes of a pretended cluster, 2x8 node 0, GPU 0 to 1 trainer rank 0 to 1, engine 0" in text
    assert "node 1, GPU 6 to 7 trainer rank 14 to 15, engine 7" in text


def test_within_a_job_the_script_is_the_run(checkout: Path):
    """As KubeRay starts it, which has submitted the job already."""
    result = planned_with(checkout, "", DRY_RUN="0", SUBMIT="0", NUM_NODES="2", RUN_DIR=str(checkout / "run"))
    started = result.splitlines()[-1]
    assert f"{checkout}/train.py --" in started
    assert "--actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus 16" in started


def test_the_head_of_several_nodes_needs_an_address(checkout: Path):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        planned_with(checkout, "", DRY_RUN="0", NUM_NODES="2", RUN_DIR=str(checkout / "run"))
    assert caught.value.returncode == 2
    assert "MASTER_ADDR: expected this node's address, at which the other nodes join, found none" in caught.value.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch sees GPUs")
def test_a_start_where_torch_sees_no_gpu_is_refused(stand_in_python: Path, tmp_path: Path):
    result = dry_run(DRY_RUN="0", RUN_DIR=str(tmp_path / "run"), PYTHON=str(stand_in_python))
    assert result.returncode == 2
    assert f"expected GPUs, found none that torch {torch.__version__} of {stand_in_python} sees" in result.stderr
    assert "run scripts/setup_gpu.sh" in result.stderr
    assert "ALLOW_CPU=1" in result.stderr
    assert not (tmp_path / "run" / "ray.log").exists()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The script in a folder of its own, with three Pythons that say who they are and what they were given."""
    shutil.copytree(ROOT / "scripts" / "models", tmp_path / "scripts" / "models")
    shutil.copy(ROOT / "scripts/count_gpus.sh", tmp_path / "scripts")
    shutil.copy(SCRIPT, tmp_path)
    for folder in (".venv/bin", ".venv-gpu/bin", "path"):
        (tmp_path / folder).mkdir(parents=True)
        program = tmp_path / folder / ("python3" if folder == "path" else "python")
        program.write_text(f'#!/bin/sh\necho {folder} "$@"\n')
        program.chmod(0o755)
    return tmp_path


def planned_with(checkout: Path, smi: str, **variables: str) -> str:
    """What the plan's Python says in a dry run, where nvidia-smi prints `smi`."""
    (checkout / "path" / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{smi}'\n")
    (checkout / "path" / "nvidia-smi").chmod(0o755)
    env = {"PATH": f"{checkout / 'path'}:/usr/bin:/bin", "DRY_RUN": "1", **variables}
    command = ["bash", str(checkout / SCRIPT.name)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_gpu_environment_is_taken_where_there_is_a_gpu(checkout: Path):
    gpu = "GPU 0: NVIDIA H100 (UUID: GPU-1)\\n"
    assert planned_with(checkout, gpu).startswith(".venv-gpu/bin ")
    assert planned_with(checkout, "").startswith(".venv/bin ")
    assert planned_with(checkout, gpu, PYTHON="python3").startswith("path ")
    shutil.rmtree(checkout / ".venv-gpu")
    assert planned_with(checkout, gpu).startswith(".venv/bin ")


def test_the_gpus_of_a_slurm_job_are_counted(checkout: Path):
    assert "--available-gpus 8" in planned_with(checkout, "")
    assert "--available-gpus 4" in planned_with(checkout, "", CUDA_VISIBLE_DEVICES="GPU-a,GPU-b,GPU-c,GPU-d")
    assert "--available-gpus 2" in planned_with(checkout, "", CUDA_VISIBLE_DEVICES="0,1,2", NUM_GPUS="2")


@pytest.mark.parametrize(
    "variable", ["NUM_GPUS=abc", "NUM_GPUS=0", "NUM_NODES=1.5", "CUDA_VISIBLE_DEVICES=,", "CUDA_VISIBLE_DEVICES=-1"]
)
def test_a_number_of_gpus_that_is_none_is_told(variable: str):
    name, value = variable.split("=")
    result = dry_run(*STAND_IN, **{name: value})
    assert result.returncode == 2
    assert f"{'NUM_NODES' if name == 'NUM_NODES' else 'NUM_GPUS'}: expected a number from 1 on, found" in result.stderr
    assert value in result.stderr


@pytest.mark.e2e
def test_the_script_runs_a_job_on_a_ray_head_of_its_own_and_stops_both(stand_in_python: Path, tmp_path: Path):
    run_dir, stop = tmp_path / "run with space", "</answer> $HOME"
    command = ["bash", str(SCRIPT), "--rollout-stop", stop]
    variables = environment(DRY_RUN="0", RUN_DIR=str(run_dir), PYTHON=str(stand_in_python), ALLOW_CPU="1")
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        deadline = threading.Timer(200, process.terminate)
        deadline.start()
        assert any(line == f"job got: {stop}\n" for line in process.stdout)
        process.terminate()
        assert process.wait(60) == 143
        deadline.cancel()
    folder = re.search(r"/tmp/sleuth-ray-\w+", (run_dir / "ray.log").read_text())
    assert folder
    assert not [command for command in running_commands() if folder[0] in command or "sleep 612" in command]
    shutil.rmtree(folder[0])


def running_commands() -> list[str]:
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return commands
