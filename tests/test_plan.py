"""`python -m sleuth.plan --cluster`: the map of a pretended cluster, and what does not fit there."""

from __future__ import annotations

from pathlib import Path

import pytest

from sleuth.plan import main

FLAGS = (
    *(
        "--hf-checkpoint",
        "qwen3-30B-A3B",
        "--prompt-data",
        "x.jsonl",
        "--custom-rm-path",
        "generate_with_search.reward_func",
    ),
    *("--actor-num-nodes", "2", "--actor-num-gpus-per-node", "8", "--tensor-model-parallel-size", "4"),
    *("--sequence-parallel", "--expert-model-parallel-size", "8", "--use-distributed-optimizer"),
    *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    *("--rollout-num-gpus-per-engine", "4", "--rollout-max-context-len", "4096", "--gpu-memory", "141"),
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = main([*FLAGS, *flags])
    captured = capsys.readouterr()
    return code, " ".join((captured.out + captured.err).split())


def test_the_map_names_every_gpu_of_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = plan(capsys, "--cluster", "3x8", "--rollout-num-gpus", "4")
    assert code == 0, text
    start = text.index("Nodes of a pretended cluster, 3x8")
    expected = (
        "Nodes of a pretended cluster, 3x8 node 0, GPU 0 to 7 trainer rank 0 to 7 node 1, GPU 0 to 7 trainer rank 8 to "
        "15 node 2, GPU 0 to 3 engine 0 node 2, GPU 4 to 7 free"
    )
    assert text[start:].startswith(expected), text[start:]


def test_colocated_engines_are_named_beside_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = plan(capsys, "--cluster", "2x8", "--colocate")
    assert code == 0, text
    assert "node 1, GPU 4 to 7 trainer rank 12 to 15, engine 3" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--cluster", "6x3", "--colocate"), "expected the 4 tensor-parallel ranks of the trainer on one node"),
        (("--cluster", "1x8", "--colocate"), "expected 16 free devices, found 8 on node 0"),
        (("--cluster", "4*8", "--colocate"), "expected NODESxGPUS, such as 4x8"),
    ],
)
def test_what_does_not_fit_the_cluster_is_refused(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    code, text = plan(capsys, *flags)
    assert code == 2
    assert message in text
