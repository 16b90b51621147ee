"""Ships the project to nodes of a Ray cluster that do not have it, by Ray's runtime environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

PROJECT = Path(__file__).parents[2]
STAYS = (".git", ".venv*", "/data", "/docs", "/tests", "/runs", "/models", "/checkpoints")
"""Parts of the project, as in a .gitignore, that no process of a run imports."""
LOOK_SECONDS = 60.0


def is_checkout() -> bool:
    """Whether the project is a folder of its own, and not installed among other packages."""
    return (PROJECT / "train.py").is_file()


def nodes_without_project() -> list[str]:
    """The addresses of other nodes on which the project cannot be imported.

    Those that do not answer are not among them: a run looks again at its nodes, more closely (`sleuth.cluster.nodes`).
    """
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    nodes.pop(ray.get_runtime_context().get_node_id(), None)

    @ray.remote(num_cpus=0, max_retries=0)
    def lacks() -> bool:  # goes by value, since it runs where the project may be missing
        try:
            import sleuth.cluster  # noqa: F401
        except ModuleNotFoundError as error:
            return (error.name or "").partition(".")[0] == "sleuth"
        return False

    asked = {
        lacks.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(): address
        for node, address in nodes.items()
    }
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_SECONDS) if asked else ([], [])
    found = []
    for answer in answered:
        try:
            if ray.get(answer):
                found.append(asked[answer])
        except ray.exceptions.RayError:
            continue
    return sorted(found)


def shipped_project() -> dict[str, Any]:
    """The runtime environment with which Ray copies the project to each node, where processes then import it."""
    return {"working_dir": str(PROJECT), "excludes": list(STAYS)}
