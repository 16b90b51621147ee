"""Runs over two nodes of one Ray cluster, with real trainers, engines and sockets between the nodes' own addresses."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.e2e.runs import ROOT, processes_of, retriever, run_training, search_config, started_training, wait_until
from tests.e2e.test_resume import content
from tests.two_nodes import Cluster, may_make_namespaces, ray_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

STEPS = 2
TWO_RANKS = ["--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1"]


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two nodes of two devices each; `request.param` are other arguments of `ray_cluster`."""
    # Not below pytest's own folder: paths of Ray's sockets would be too long there.
    place = tempfile.TemporaryDirectory(prefix="nodes_", dir="/tmp", ignore_cleanup_errors=True)
    arguments = {"devices": [2, 2]} | getattr(request, "param", {})
    with place as folder, ray_cluster(Path(folder), **arguments) as nodes:
        yield nodes


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("cluster", [{"apart": may_make_namespaces()}], ids=str, indirect=True)
def test_trainer_and_engines_on_two_nodes_end_as_on_one(cluster, flags, tmp_path):
    """In network namespaces where this process may make them; the retrieval server is then in the first one, too."""
    with retriever(tmp_path, cluster.first) as url:
        (tmp_path / "search.yaml").write_text(search_config(url))
        nodes = [*flags, *TWO_RANKS, "--rollout-num-gpus", "2"]
        code, output = run_training(nodes, environment=cluster.environment, before=cluster.first)
    assert code == 0, output
    lines = metrics_of(tmp_path / "run")
    assert all(line["train/rollout_logprob_abs_diff"] < 1e-4 for line in lines)  # the probe, of both engines
    trained = [line for line in lines if line["step"] > 0]
    assert all(line["train/train_rollout_logprob_abs_diff"] < 1e-4 for line in trained)
    assert all(line["rollout/searches"] > 0 for line in trained)
    # The cluster outlives the run, and ends its processes a moment later.
    wait_until(lambda: not processes_of(tmp_path / "run"), "the end of the run's processes", 60)
    one_node = [
        *("--debug-train-only", str(tmp_path / "save"), "--save", str(tmp_path / "again")),
        *("--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2", "--run-dir", str(tmp_path / "one_node")),
    ]
    code, output = run_training([*flags, *one_node])
    assert code == 0, output
    found, expected = content(tmp_path / "save", STEPS), content(tmp_path / "again", STEPS)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    again = [line for line in metrics_of(tmp_path / "one_node") if line["step"] > 0]
    for name in ("train/loss", "train/grad_norm"):
        assert [line[name] for line in trained] == [line[name] for line in again]


def test_a_node_of_engines_dies_and_the_run_goes_on_with_one_node(cluster, flags, tmp_path):
    """Trainer on the first node, engines on the second, weights over the network."""
    flags = [flag for flag in flags if flag != "--colocate"]
    apart = ["--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2", "--update-weights-through", "distributed"]
    tracker = tmp_path / "save/latest_checkpointed_iteration.txt"
    with started_training([*flags, *apart, "--num-rollout", "100"], environment=cluster.environment) as process:
        wait_until(lambda: tracker.exists() or process.poll() is not None, "the first checkpoint")
        assert process.poll() is None, process.communicate()[0]
        engines = [found for found in processes_of(tmp_path / "run") if "sleuth.engine.launch" in found.cmdline()]
        tree = psutil.Process(cluster.nodes[1].pid).children(recursive=True)
        assert len(engines) == 2
        assert all(engine in tree for engine in engines)
        began = time.monotonic()
        for member in [psutil.Process(cluster.nodes[1].pid), *tree]:
            member.kill()
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 1
        assert time.monotonic() - began < 60
    *_, death, _, advice = output.splitlines()
    assert f"found {cluster.addresses[1]} dead" in death
    assert advice.startswith(f"--load {tmp_path / 'save'} goes on from step ")
    # The cluster outlives the run, and ends its processes a moment later.
    wait_until(lambda: not processes_of(tmp_path / "run"), "the end of the run's processes", 60)

    steps = int(tracker.read_text()) + 1
    fewer = ["--colocate", "--load", str(tmp_path / "save"), "--num-rollout", str(steps)]
    code, output = run_training([*flags, *fewer], environment=cluster.environment)
    assert code == 0, output
    assert f"resumed from step {steps - 1} of" in output
    last = metrics_of(tmp_path / "run")[-1]
    assert last["step"] == steps
    assert last["train/train_rollout_logprob_abs_diff"] < 1e-4


NO_PROJECT = {"hidden": ROOT / "sleuth"} if may_make_namespaces() else {}


@pytest.mark.parametrize("cluster", [{"devices": [1, 1]} | NO_PROJECT], ids=str, indirect=True)
def test_one_engine_lies_on_two_nodes_and_is_started_again(cluster, flags, tmp_path):
    """Its two tensor-parallel ranks read their weights each from the trainer rank on its node.

    Where this process may hide the project from the second node (root), Ray ships it there.
    """
    run_dir = tmp_path / "run"
    across = ["--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", "--allow-tensor-parallel-across-nodes"]

    def server_on_the_second_node() -> psutil.Process:
        words = [(found, found.cmdline()) for found in processes_of(run_dir)]
        servers = [(found, line) for found, line in words if "sleuth.engine.launch" in line]
        assert len(servers) == 2
        return next(found for found, line in servers if line[line.index("--node-rank") + 1] == "1")

    flags = [*flags, *TWO_RANKS, *across, "--num-rollout", "3"]
    with started_training(flags, environment=cluster.environment) as process:
        metrics = run_dir / "metrics.jsonl"
        wait_until(lambda: process.poll() is not None or metrics.exists(), "the first probe")
        assert process.poll() is None, process.communicate()[0]
        server_on_the_second_node().kill()
        output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    assert re.search(r"engine 0: .*its node 1: the engine at http://127.0.0.3:\d+ was killed by signal 9", output)
    assert "it is started again (1 of at most 3 times)" in output
    assert ("node 127.0.0.3 does not have the project: Ray ships it there" in output) == bool(NO_PROJECT)
    lines = metrics_of(run_dir)
    assert all(line["train/rollout_logprob_abs_diff"] < 1e-4 for line in lines)
    trained = [line for line in lines if line["step"] > 0]
    assert len(trained) == 3
    assert all(line["train/train_rollout_logprob_abs_diff"] < 1e-4 for line in trained)
    assert all(line["perf/memory/engine_0_node_1"] > 0.1 for line in trained)
    wait_until(lambda: not processes_of(run_dir), "the end of the run's processes", 60)
