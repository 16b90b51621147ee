"""What is checked on every node before a run over several starts, and what is told when one dies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import ray

from sleuth.cluster import nodes
from sleuth.cluster.nodes import NodeDiedError, _differences, _look, node_deaths_explained, watch_nodes

HERE, THERE = "10.0.0.1", "10.0.0.2"


@pytest.fixture
def look(tmp_path: Path) -> Any:
    """What a node sees of a shared folder, a model and a hook; keyword arguments say where it has them."""
    for folder, size in (("here", 3), ("there", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("x" * size)
    (tmp_path / "mark").touch()

    def see(mark: str = "mark", model: str = "here", hook: str = "qa_em_format", package: str = "torch") -> Any:
        found = _look({"--save": tmp_path / mark}, {"--hf-checkpoint": tmp_path / model}, [hook], [package])
        return found | {
            "hooks": {"qa_em_format": found["hooks"][hook]},
            "packages": {"torch": found["packages"][package]},
        }

    return see


def test_nodes_that_see_the_same_fit_together(look: Any) -> None:
    assert list(_differences(THERE, HERE, look(), look())) == []


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"mark": "none"}, r"--save: expected the folder of node 10.0.0.1, .* name a folder on a file system that all"),
        (
            {"model": "there"},
            r"--hf-checkpoint: expected .*config.json \(3 bytes\)\), found config.json \(2 bytes\); copy",
        ),
        ({"model": "none"}, r"--hf-checkpoint: expected .* found no folder; copy them to the same path"),
        (
            {"hook": "no_such"},
            r"the hook module qa_em_format: .* found ModuleNotFoundError: No module named 'no_such'; p",
        ),
        (
            {"package": "no-such"},
            r"expected torch [\d.]+\S*, as on node 10.0.0.1, found none; use the same environment",
        ),
    ],
)
def test_each_difference_names_node_path_and_remedy(look: Any, other: dict[str, str], message: str) -> None:
    (found,) = _differences(THERE, HERE, look(**other), look())
    assert re.match(rf"node {THERE}: {message}", found), found


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes that Ray counts as alive; HERE and THERE are known."""
    living = [HERE, THERE]

    def listed() -> list[dict[str, Any]]:
        why = "raylet is gone"
        return [{"NodeManagerAddress": n, "Alive": n in living, "DeathReasonMessage": why} for n in (HERE, THERE)]

    monkeypatch.setattr(ray, "nodes", listed)
    monkeypatch.setattr(nodes, "NOTICE_SECONDS", 0.0)
    return living


def test_a_dead_node_is_named_in_place_of_what_followed(alive: list[str]) -> None:
    with pytest.raises(ConnectionError, match="reset"):
        fail(ConnectionError("reset"))  # both live
    alive.remove(THERE)
    with pytest.raises(NodeDiedError) as error:
        fail(ConnectionError("reset"))
    assert str(error.value) == (
        "expected the nodes 10.0.0.1, 10.0.0.2 to live until the end, found 10.0.0.2 dead or out of reach (Ray says: "
        "raylet is gone); start again on the other nodes, with fewer GPUs if need be; add --load saved to the same "
        "command to go on"
    )
    with pytest.raises(ValueError, match="another reason"):
        fail(ValueError("another reason"))


def test_a_wait_ends_when_a_node_has_died(alive: list[str]) -> None:
    look = watch_nodes([HERE, THERE])
    assert look() == []
    alive.remove(THERE)
    with pytest.raises(NodeDiedError, match=r"found 10\.0\.0\.2 dead"):
        look()
    assert watch_nodes([THERE])() == []  # a run on one node dies with it


def fail(error: Exception) -> None:
    with node_deaths_explained([HERE, THERE], Path("saved")):
        raise error
