"""Which devices trainer ranks and engines get, with GPUs that Ray believes in: no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sleuth.cluster import engines
from sleuth.cluster.engines import engine_config
from sleuth.cluster.placement import Device, Placement, _in_order, _position
from sleuth.engine.devices import as_numbers, check_granted
from sleuth.engine.server import server_args, server_environment
from tests.flags import parse

SCRIPT = """
import json, os, sys
from types import SimpleNamespace

import ray

job = json.loads(sys.argv[1])
ray.init(address="local", num_cpus=12, num_gpus=job["gpus"], include_dashboard=False, configure_logging=False)
from sleuth.cluster import placement

if job["pretend"]:
    placement.check_granted = lambda gpu_ids: None
@ray.remote(num_gpus=1)
class Other:
    def ids(self): return [str(gpu) for gpu in ray.get_gpu_ids()]

if job["taken"]:  # others hold all, and let go of some
    others = [Other.remote() for _ in range(job["gpus"])]
    for other, (gpu,) in zip(others, ray.get([other.ids.remote() for other in others])):
        if gpu not in job["taken"]:
            ray.kill(other)

engines = job["engines"]
args = SimpleNamespace(actor_world_size=4, total_gpus=4, num_engines=engines, rollout_num_gpus_per_engine=4 // engines,
                       colocate=True, trains=True, actor_num_gpus_per_node=4,
                       tensor_model_parallel_size=1, allow_tensor_parallel_across_nodes=False)
try:
    placed = placement.place(args)
    placement.check_devices(placed, args.rollout_num_gpus_per_engine)
except Exception as error:
    print(json.dumps({"error": str(getattr(error, "cause", error))}))
    sys.exit()

@ray.remote
class Actor:
    def look(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES"), [str(gpu) for gpu in ray.get_gpu_ids()]

actors = [Actor.options(**placed.options(device)).remote() for device in placed.trainer]
seen = ray.get([actor.look.remote() for actor in actors])
print(json.dumps({"trainer": [d.gpu_id for d in placed.trainer], "engines": [d.gpu_id for d in placed.engines],
                  "node": [node for node, _ in seen], "granted": [ids[0] for _, ids in seen]}))
"""


def place(
    visible: str | None, *, gpus: int, engines: int = 2, taken: Sequence[str] = (), pretend: bool = True
) -> dict[str, Any]:
    """What a run of four trainer ranks and as many GPUs of engines gets on a node of so many pretended GPUs."""
    env = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")}
    env |= {"RAY_AUTH_TOKEN": "x" * 32, "PYTHONPATH": str(Path(__file__).parents[2])}
    env |= {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    job = json.dumps({"gpus": gpus, "engines": engines, "taken": list(taken), "pretend": pretend})
    command = [sys.executable, "-c", SCRIPT, job]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("visible", "gpus", "taken", "expected"),
    [
        ("4,5,6,7", 4, [], "4 5 6 7"),  # a job of Slurm
        (None, 6, ["1", "2"], "0 3 4 5"),  # a hole, where another job is
        ("GPU-d,GPU-c,GPU-e,GPU-b,GPU-a", 5, ["GPU-c"], "GPU-d GPU-e GPU-b GPU-a"),  # in the node's order
    ],
)
def test_trainer_and_engines_get_what_was_granted(
    visible: str | None, gpus: int, taken: list[str], expected: str
) -> None:
    placed = place(visible, gpus=gpus, taken=taken)
    assert placed["trainer"] == placed["engines"] == placed["granted"] == expected.split()
    assert placed["node"] == [visible] * 4, "Ray must leave CUDA_VISIBLE_DEVICES to us"


def test_an_engine_does_not_span_slices_of_a_gpu() -> None:
    slices = "MIG-a,MIG-b,MIG-c,MIG-d"
    error = place(slices, gpus=4)["error"]
    assert "--rollout-num-gpus-per-engine 2: expected 1" in error
    assert "found MIG-a, MIG-b, MIG-c, MIG-d" in error


def test_gpus_that_torch_does_not_see_end_the_run_before_an_actor_starts() -> None:
    if torch.cuda.is_available():
        pytest.skip("this torch sees GPUs")
    assert place(None, gpus=4, pretend=False)["error"] == (
        f"Ray grants GPU 0, torch {torch.__version__} sees none: run scripts/setup_gpu.sh and use .venv-gpu/bin/python"
    )


@pytest.mark.parametrize(
    ("gpu", "visible", "position"),
    [("3", None, 3), ("6", "4,6,5", 1), ("GPU-b", "GPU-c, GPU-b", 1), ("MIG-a", None, 0), (None, "4", 0)],
)
def test_position_in_the_nodes_list(gpu: str | None, visible: str | None, position: int) -> None:
    assert _position(gpu, visible) == position


@pytest.mark.parametrize("layout", ["aabb", "abab", "bbaa", "abba", "abcb"])
def test_each_device_lies_on_the_node_that_the_layout_chose(layout: str) -> None:
    devices = [Device(bundle, node, None) for bundle, node in enumerate(sorted(layout))]
    placed = _in_order(devices, list(layout))
    assert "".join(device.node_ip for device in placed) == layout
    for node in layout:
        bundles = [device.bundle for device in placed if device.node_ip == node]
        assert bundles == [device.bundle for device in devices if device.node_ip == node]


def test_servers_listen_on_the_network_only_where_other_nodes_ask_them() -> None:
    first, second = Device(0, "10.0.0.1", None), Device(1, "10.0.0.2", None)
    alone = Placement(None, [first], [first], driver_ip="10.0.0.1")
    assert (alone.nodes, alone.host("10.0.0.1")) == (["10.0.0.1"], "127.0.0.1")
    for placement in (Placement(None, [first], [second], "10.0.0.1"), Placement(None, [second], [second], "10.0.0.1")):
        assert placement.nodes == ["10.0.0.1", "10.0.0.2"]
        assert placement.host("10.0.0.2") == "10.0.0.2"
    config = engine_config(parse(), Path("run"), 0, [second], placement.host(second.node_ip))
    assert "--host 10.0.0.2 --port 1234" in " ".join(server_args(config, 1234, on_gpu=False))


def environment_of_an_engine(*gpu_ids: str | None) -> tuple[list[str], dict[str, str]]:
    devices = [Device(i, "127.0.0.1", gpu) for i, gpu in enumerate(gpu_ids)]
    args = parse("--actor-num-gpus-per-node", "4", "--rollout-num-gpus-per-engine", str(len(gpu_ids)))
    config = engine_config(args, Path("run"), 1, devices)
    return server_args(config, 1234, on_gpu=True), server_environment(config, Path("folder"), on_gpu=True)


def test_an_engine_sees_its_own_gpus_and_no_others() -> None:
    args, environment = environment_of_an_engine("3", "4")
    assert environment["CUDA_VISIBLE_DEVICES"] == "3,4"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "--base-gpu-id" not in args
    assert "--disable-custom-all-reduce" not in args


@pytest.mark.parametrize("colocate", [True, False])
@pytest.mark.parametrize("parts", [("weights", "kv_cache", "cuda_graph"), ("weights", "kv_cache")])
def test_graphs_lie_in_memory_of_the_saver_if_they_are_released(
    colocate: bool, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "ENGINE_PARTS", parts)
    args = parse("--colocate") if colocate else parse("--no-colocate", "--rollout-num-gpus", "1")
    config = engine_config(args, Path("run"), 0, [Device(0, "127.0.0.1", "0")])
    environment = server_environment(config, Path("folder"), on_gpu=True)
    assert environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == str(int(colocate and "cuda_graph" in parts))


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that lists three GPUs."""
    path = tmp_path / "nvidia-smi"
    path.write_text("#!/bin/sh\nprintf '%s\\n' '0, GPU-1a2b' '1, GPU-1a3c' '2, GPU-77'\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.usefixtures("nvidia_smi")
def test_an_engine_on_several_gpus_gets_their_numbers() -> None:
    """SGLang's all-reduce takes only numbers."""
    args, environment = environment_of_an_engine("GPU-77", "GPU-1a2b")
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,0"
    assert "--disable-custom-all-reduce" not in args


@pytest.mark.usefixtures("nvidia_smi")
def test_uuids_that_name_no_single_gpu_stay_as_they_are() -> None:
    assert as_numbers(["GPU-1a"]) is None
    args, environment = environment_of_an_engine("GPU-77", "GPU-x")
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-77,GPU-x"
    assert "--disable-custom-all-reduce" in args


def test_a_slice_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    args, environment = environment_of_an_engine("MIG-1234")
    assert environment["CUDA_VISIBLE_DEVICES"] == "MIG-1234"
    assert "--disable-custom-all-reduce" not in args


def test_devices_that_are_granted_must_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "as before")  # so that it is put back
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_granted(["5"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    with pytest.raises(ValueError, match=r"Ray grants GPUs 5, 6, torch .* sees 1: it was built for CUDA 13.0: compare"):
        check_granted(["5", "6"])


def test_without_granted_gpus_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as before")
    check_granted([])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "as before"
