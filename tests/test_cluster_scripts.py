"""The scripts for several nodes: the RayJob by the fields of its type, the batch script by running its parts here."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.scripts.scripts import start

from tests.e2e.runs import wait_until

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = json.loads((Path(__file__).parent / "rayjob.schema.json").read_text())


@pytest.fixture(scope="module")
def rayjob() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "scripts/kuberay.yaml").read_text())


def test_the_rayjob_has_only_fields_that_its_type_has(rayjob: dict[str, Any]) -> None:
    jsonschema.validate(rayjob, SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "entryPoint"), "x"),
        (("spec", "submissionMode"), "JobMode"),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0, "replicas"), "2"),
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-gpus"), 8),
    ],
)
def test_the_schema_finds_mistakes(rayjob: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    broken = json.loads(json.dumps(rayjob))
    inner = broken
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_volumes_numbers_and_paths_of_the_rayjob_fit_together(rayjob: dict[str, Any]) -> None:
    cluster = rayjob["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert all(mount["name"] in volumes for c in pod["containers"] for mount in c["volumeMounts"])
    words = shlex.split(rayjob["spec"]["entrypoint"])
    variables = dict(word.split("=", 1) for word in words[1:] if "=" in word)
    gpus = [
        int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for group in groups
    ]
    assert {str(count) for count in gpus} == {variables["NUM_GPUS"]}
    assert int(variables["NUM_NODES"]) == 1 + sum(group["replicas"] for group in groups[1:])
    assert words[-1] == "/sleuth/run_qwen2.5_3B.sh"
    assert (ROOT / "scripts/models" / f"{variables['MODEL']}.sh").is_file()
    assert cluster["rayVersion"] == ray.__version__


TOOLS = {
    "python": """
        echo "python $*" >>"$NOTES"
        case "$*" in
        *token_hex*) echo 00ff ;;
        *"scripts start"*) trap 'echo "worker leaves" >>"$NOTES"; exit 0' TERM; sleep 60 >/dev/null 2>&1 & wait ;;
        esac
    """,
    "scontrol": 'printf "%s\\n" $HOSTS',
    "getent": 'echo "127.0.1.1 STREAM first"; echo "10.0.0.1 STREAM first"',
    "srun": 'echo "srun $*" >>"$NOTES"; while [[ "$1" != bash ]]; do shift; done; exec "$@"',
}
"""Stand-ins for what a Slurm node has. A Ray that "runs" waits until it is stopped."""
RUN = """
    echo "run $MASTER_ADDR $NUM_NODES $NUM_GPUS $RAY_AUTH_TOKEN $*" >>"$NOTES"
    trap 'echo "run saves" >>"$NOTES"; exit 143' TERM
    for _ in $(seq "$RUN_TENTHS"); do sleep 0.1; done
"""
"""In place of run_qwen2.5_3B.sh."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the batch script as Slurm does, with stand-ins; environment variables are keyword arguments."""
    for name in ("slurm.sbatch", "ray_worker.sh", "count_gpus.sh"):
        (tmp_path / "scripts").mkdir(exist_ok=True)
        (tmp_path / "scripts" / name).write_text((ROOT / "scripts" / name).read_text())
    (tmp_path / "run_qwen2.5_3B.sh").write_text(RUN)
    (tmp_path / "bin").mkdir()
    for name, text in TOOLS.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    started: list[subprocess.Popen[str]] = []

    def launch(*flags: str, **variables: str) -> subprocess.Popen[str]:
        environment = {
            **{"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "bin/python")},
            **{"NOTES": str(tmp_path / "notes"), "HOSTS": "first second third", "RUN_TENTHS": "20"},
            **{"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_GPUS_ON_NODE": "4"},
        }
        command = ["bash", str(tmp_path / "scripts/slurm.sbatch"), *flags]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment | variables, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield launch
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def head() -> Iterator[int]:
    """The port of what listens where Ray's head would."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def notes(tmp_path: Path) -> list[str]:
    path = tmp_path / "notes"
    return path.read_text().splitlines() if path.exists() else []


def test_a_slurm_job_runs_on_the_first_node_and_has_a_worker_on_each_other(
    tmp_path: Path, job: Callable[..., subprocess.Popen[str]], head: int
) -> None:
    process = job("--lr", "2e-6", MASTER_ADDR="127.0.0.1", RAY_PORT=str(head))
    output, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    found = notes(tmp_path)
    assert "run 127.0.0.1 3 4 00ff --lr 2e-6" in found
    assert "srun --nodes 2 --ntasks 2 --ntasks-per-node 1 --nodelist second,third bash scripts/ray_worker.sh" in found
    (worker,) = [line.split(" start ")[1].split() for line in found if "scripts start" in line]
    start.make_context("start", list(worker))  # Ray's own parser
    assert worker[:4] == ["--address", f"127.0.0.1:{head}", "--num-gpus", "4"]
    assert found[-1] == "worker leaves"
    assert f"the run on first (127.0.0.1:{head}), workers on second third" in output


def test_the_address_of_a_node_is_not_one_that_only_itself_can_reach(
    tmp_path: Path, job: Callable[..., subprocess.Popen[str]]
) -> None:
    process = job(HOSTS="first", RUN_TENTHS="0")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert "run 10.0.0.1 1 4 00ff " in notes(tmp_path)


def test_before_the_time_is_over_the_run_saves_and_the_job_ends(
    tmp_path: Path, job: Callable[..., subprocess.Popen[str]], head: int
) -> None:
    process = job(MASTER_ADDR="127.0.0.1", RAY_PORT=str(head), RUN_TENTHS="600")
    wait_until(lambda: any("scripts start" in line for line in notes(tmp_path)), "the worker", seconds=60)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert notes(tmp_path)[-2:] == ["run saves", "worker leaves"]


def test_a_worker_without_a_head_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {"PATH": os.environ["PATH"], "RAY_AUTH_TOKEN": "x", "MASTER_ADDR": "127.0.0.1", "RAY_PORT": str(port)}
    command = ["bash", str(ROOT / "scripts/ray_worker.sh")]
    environment |= {"WAIT_SECONDS": "0", "PYTHON": "python"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"expected a Ray head at 127.0.0.1:{port}, found none" in done.stderr
    del environment["RAY_AUTH_TOKEN"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "expected the token of the Ray head, found none; set RAY_AUTH_TOKEN" in done.stderr
