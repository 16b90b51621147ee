"""The nodes of a run over several: checks that they see the same files and code, and tells which one has died."""

from __future__ import annotations

import hashlib
import importlib
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sleuth.arguments import Args
from sleuth.hooks import hook_modules

PACKAGES = ("torch", "sglang", "megatron-core", "transformers")
LOOK_SECONDS = 180.0
"""For all nodes together; a first look imports the hooks from a folder that may be slow."""
NOTICE_SECONDS = 45.0
"""Ray takes up to 30 s to be sure that a node has died that says nothing any more."""


class NodeDiedError(RuntimeError):
    """A node of the run died or left the cluster."""


def check_nodes(args: Args, run_dir: Path, nodes: Iterable[str]) -> None:
    """Look from each of the `nodes` (addresses, the driver's first) at what it must share with the driver's.

    Folders that are written from several nodes must be one folder; the model, checkpoints to start from, the packages
    and the hooks may be copies. Raises ValueError that names for each trouble node, path and remedy.
    """
    here, *others = nodes
    if not others:
        return
    with _marked(_shared(args, run_dir)) as marks:
        wanted = _look(marks, _copied(args), _hook_names(args), PACKAGES)
        troubles: list[str] = []
        for node, found in _looks(others, marks, _copied(args), _hook_names(args)).items():
            troubles += [found] if isinstance(found, str) else _differences(node, here, found, wanted)
    if troubles:
        raise ValueError("the run's nodes do not fit together\n  " + "\n  ".join(troubles))


@contextmanager
def node_deaths_explained(nodes: Iterable[str], save: Path | None) -> Iterator[None]:
    """If the block fails because one of the `nodes` has died, raise NodeDiedError in place of what followed.

    `save`: the folder of checkpoints, from which the run can go on.
    """
    nodes = list(nodes)
    try:
        yield
    except NodeDiedError as error:
        raise NodeDiedError(f"{error}{_way_on(save)}") from None
    except Exception as error:
        if len(nodes) == 1 or not _may_be_a_death(error) or not (dead := _dead_nodes(nodes)):
            raise
        raise NodeDiedError(f"{_told(nodes, dead)}{_way_on(save)}") from error


def watch_nodes(nodes: Sequence[str]) -> Callable[[], list[str]]:
    """A look for a `Waiter`: NodeDiedError if Ray counts a node as dead, since its answers would be waited for."""

    def look() -> list[str]:
        if len(nodes) > 1 and (dead := _dead_nodes(nodes, patience=0.0)):
            raise NodeDiedError(_told(nodes, dead))
        return []

    return look


def _told(nodes: Sequence[str], dead: Sequence[str]) -> str:
    return (
        f"expected the nodes {', '.join(nodes)} to live until the end, found {', '.join(dead)} dead or out of reach "
        f"(Ray says: {_reason(dead[0])}); start again on the other nodes, with fewer GPUs if need be"
    )


def _way_on(save: Path | None) -> str:
    return "" if save is None else f"; add --load {save} to the same command to go on"


def _may_be_a_death(error: BaseException | None) -> bool:
    """Whether the error, or one behind it, is one that Ray or a lost connection makes."""
    while error is not None:
        if isinstance(error, ray.exceptions.RayError | ConnectionError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _dead_nodes(nodes: Sequence[str], patience: float | None = None) -> list[str]:
    """Those of `nodes` that Ray counts as dead within `patience` seconds [the time that it needs to notice]."""
    deadline = time.monotonic() + (NOTICE_SECONDS if patience is None else patience)
    while True:
        alive = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        dead = [node for node in nodes if node not in alive]
        if dead or time.monotonic() >= deadline:
            return dead
        time.sleep(1.0)


def _reason(address: str) -> str:
    found = [node for node in ray.nodes() if node["NodeManagerAddress"] == address]
    return (found[-1].get("DeathReasonMessage") if found else None) or "no reason"


def _shared(args: Args, run_dir: Path) -> dict[str, Path]:
    """The folders that several nodes write to, by the setting that names them."""
    folders = {"--run-dir": run_dir}
    if args.save is not None and args.trains:
        folders["--save"] = args.save.resolve()
    return folders


def _copied(args: Args) -> dict[str, Path]:
    """What several nodes read, by the setting that names it."""
    named = {"--hf-checkpoint": Path(args.hf_checkpoint), "--ref-load": args.ref_load, "--load": args.load}
    return {name: path.resolve() for name, path in named.items() if path is not None and path.exists()}


def _hook_names(args: Args) -> list[str]:
    return [module.__name__ for module in hook_modules(args) if module.__file__]


@contextmanager
def _marked(folders: Mapping[str, Path]) -> Iterator[dict[str, Path]]:
    """A new file in each folder, for the other nodes to see."""
    marks = {name: folder / f".sleuth.seen.{uuid.uuid4().hex[:12]}" for name, folder in folders.items()}
    try:
        for mark in marks.values():
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        yield marks
    finally:
        for mark in marks.values():
            mark.unlink(missing_ok=True)


def _looks(
    nodes: Iterable[str], marks: Mapping[str, Path], copied: Mapping[str, Path], hooks: Sequence[str]
) -> dict[str, dict[str, Any] | str]:
    """What each node sees, or a sentence about why it does not say."""
    ids = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}

    @ray.remote(num_cpus=0, max_retries=0)
    def look() -> dict[str, Any] | str:  # goes by value: a node that lacks the project can tell so
        try:
            from sleuth.cluster.nodes import PACKAGES, _look
        except ImportError as error:
            return str(error)
        return _look(marks, copied, hooks, PACKAGES)

    asked = {
        node: look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(ids[node], soft=False)).remote()
        for node in nodes
    }
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=LOOK_SECONDS)
    found: dict[str, dict[str, Any] | str] = {}
    for node, reference in asked.items():
        try:
            answer = ray.get(reference, timeout=0.1)
        except (ray.exceptions.RayError, TimeoutError) as error:
            found[node] = f"node {node}: it does not say what it sees ({type(error).__name__}: {str(error)[:300]})"
            continue
        found[node] = answer
        if isinstance(answer, str):
            found[node] = (
                f"node {node}: expected the project and its packages at the same paths as here, found {answer}; put "
                f"{Path.cwd()} and the environment ({sys.prefix}) on a shared folder, or copy them there"
            )
    return found


def _look(
    marks: Mapping[str, Path], copied: Mapping[str, Path], hooks: Iterable[str], packages: Iterable[str]
) -> dict[str, Any]:
    """What this node sees; runs on it."""
    return {
        "marks": {name: mark.exists() for name, mark in marks.items()},
        "copied": {name: _described(path) for name, path in copied.items()},
        "hooks": {name: _imported(name) for name in hooks},
        "packages": {name: _version(name) for name in packages},
        "code": _fingerprint(sorted(Path(__file__).parents[1].rglob("*.py"))),
    }


def _described(path: Path) -> str | None:
    """The names and sizes of the files of a model or checkpoint; None if nothing is there."""
    if not path.is_dir():
        return None
    files = sorted((file.name, file.stat().st_size) for file in path.iterdir() if file.is_file())
    return ", ".join(f"{name} ({size} bytes)" for name, size in files if not name.startswith("."))


def _imported(name: str) -> str:
    """A fingerprint of the hook's file, or why it cannot be imported."""
    try:
        return _fingerprint([Path(str(importlib.import_module(name).__file__))])
    except Exception as error:  # whatever a user's module raises
        return f"{type(error).__name__}: {error}"


def _fingerprint(files: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _differences(node: str, here: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """Sentences about what `node` sees otherwise than this one, `here`, does."""
    for name, seen in found["marks"].items():
        if not seen:
            yield (
                f"node {node}: {name}: expected the folder of node {here}, into which a file was just written, found "
                "another one or none at that path; name a folder on a file system that all nodes share"
            )
    for name, files in found["copied"].items():
        if files != wanted["copied"][name]:
            yield (
                f"node {node}: {name}: expected the files that node {here} has there ({wanted['copied'][name]}), found "
                f"{files or 'no folder'}; copy them to the same path, or name a shared folder"
            )
    for name, fingerprint in found["hooks"].items():
        if fingerprint != wanted["hooks"][name]:
            what = "another version" if len(fingerprint) == len(wanted["hooks"][name]) else fingerprint
            yield (
                f"node {node}: the hook module {name}: expected to import it as on node {here}, found {what}; put it "
                "on a shared folder, or copy it and what it imports to the same path"
            )
    for name, number in found["packages"].items():
        if number != wanted["packages"][name]:
            yield (
                f"node {node}: expected {name} {wanted['packages'][name]}, as on node {here}, found "
                f"{number or 'none'}; use the same environment on every node (scripts/setup_gpu.sh)"
            )
    if found["code"] != wanted["code"]:
        yield f"node {node}: expected the code of sleuth as on node {here}, found another; copy or share the project"
