"""On which node each device of a run lies: what must share a node does, and as few nodes as possible are used.

Knows nothing of Ray: `sleuth.cluster.placement` reserves what `lay_out` says, and `sleuth.plan` prints it for a
pretended cluster. Devices are counted through the run: the trainer's ranks first, then the engines' own; colocated,
both begin with device 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

ACROSS = "--allow-tensor-parallel-across-nodes"


class LayoutArgs(Protocol):
    """The flags that are read here."""

    @property
    def actor_num_gpus_per_node(self) -> int: ...
    @property
    def tensor_model_parallel_size(self) -> int: ...
    @property
    def rollout_num_gpus_per_engine(self) -> int: ...
    @property
    def colocate(self) -> bool: ...
    @property
    def allow_tensor_parallel_across_nodes(self) -> bool: ...
    @property
    def trains(self) -> bool: ...
    @property
    def actor_world_size(self) -> int: ...
    @property
    def num_engines(self) -> int: ...
    @property
    def total_gpus(self) -> int: ...


class LayoutError(ValueError):
    """The free devices do not allow the run, or only with groups of ranks that cross nodes."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Devices that go to one node together: at most `most` of `what` go to one node, as long as others have room."""

    what: str
    size: int
    count: int
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring devices of one node with the same role: `ranks` of the trainer, and the engine, if there is one."""

    devices: range
    ranks: range
    engine: int | None


def lay_out(args: LayoutArgs, free: Mapping[str, int]) -> list[str]:
    """The node of each device, given how many devices are `free` on each node.

    Raises LayoutError if they are too few, or if an engine's ranks, or the tensor-parallel ranks of the trainer, would
    lie on several nodes without leave; with it, an engine's must be in equal parts on neighbouring nodes.
    """
    if sum(free.values()) < args.total_gpus:
        raise LayoutError(
            f"expected {args.total_gpus} free devices, found {_listed(free)}; lower --actor-num-nodes, "
            "--actor-num-gpus-per-node or --rollout-num-gpus, or add nodes"
        )
    left = dict(sorted(free.items(), key=lambda item: -item[1]))
    nodes: list[str] = []
    for unit in _units(args):
        nodes += _place(unit, left)
    if problems := list(crossing(args, nodes)):
        raise LayoutError(f"{'; '.join(problems)}; free devices: {_listed(free)}")
    return nodes


def crossing(args: LayoutArgs, nodes: Sequence[str]) -> Iterator[str]:
    """A sentence for each kind of group that would lie on several of the devices' `nodes`."""
    tensor, engine = args.tensor_model_parallel_size, args.rollout_num_gpus_per_engine
    if not args.allow_tensor_parallel_across_nodes and (found := _first_split(_trainer_nodes(args, nodes), tensor)):
        yield (
            f"expected the {tensor} tensor-parallel ranks of the trainer on one node, found them on "
            f"{' and '.join(found)}, which is slow; lower --tensor-model-parallel-size, give the trainer a multiple of "
            f"it on each node (--actor-num-gpus-per-node), or add {ACROSS}"
        )
    engines = _engine_nodes(args, nodes)
    if not args.allow_tensor_parallel_across_nodes and (found := _first_split(engines, engine)):
        yield (
            f"expected the {engine} GPUs of an engine on one node, found them on {' and '.join(found)}, which is slow; "
            "lower --rollout-num-gpus-per-engine, give engines and trainer numbers of GPUs on each node that it "
            f"divides, or add {ACROSS}"
        )
    elif uneven := _first_uneven(engines, engine):
        yield (
            f"expected the {engine} GPUs of an engine in equal parts on its nodes, found {uneven}; change "
            "--rollout-num-gpus-per-engine, or give engines and trainer whole nodes"
        )


def parts(args: LayoutArgs, nodes: Sequence[str]) -> dict[str, list[Part]]:
    """For each node what its devices are for, in order."""
    trainer = args.actor_world_size if args.trains else 0
    first_engine = 0 if args.colocate else trainer
    size, last = args.rollout_num_gpus_per_engine, first_engine + args.num_engines * args.rollout_num_gpus_per_engine

    def role(device: int) -> tuple[str, bool, int | None]:
        engine = (device - first_engine) // size if first_engine <= device < last else None
        return nodes[device], device < trainer, engine

    found: dict[str, list[Part]] = {}
    start = 0
    for device in range(1, len(nodes) + 1):
        if device == len(nodes) or role(device) != role(start):
            node, trains, engine = role(start)
            devices = range(start, device)
            found.setdefault(node, []).append(Part(devices, devices if trains else range(0), engine))
            start = device
    return found


def _units(args: LayoutArgs) -> Iterator[Unit]:
    """The run's devices in their order, cut where a node may end."""
    trainer = args.actor_world_size if args.trains else 0
    tensor = args.tensor_model_parallel_size
    engine, engines = args.rollout_num_gpus_per_engine, args.num_engines
    per_node = args.actor_num_gpus_per_node
    if args.colocate and trainer and engines:
        size = math.lcm(tensor, engine)
        shared = min(trainer, engines * engine) // size * size
        yield from _cut("trainer and engines", shared, size, per_node)
        yield from _cut("trainer", trainer - shared, tensor, per_node)
        yield from _cut("engines", max(0, engines * engine - max(trainer, shared)), engine, None)
        return
    yield from _cut("trainer", trainer, tensor, per_node)
    yield from _cut("engines", engines * engine, engine, None)


def _cut(what: str, devices: int, size: int, per_node: int | None) -> Iterator[Unit]:
    most = per_node // size if per_node is not None and per_node >= size else None
    yield Unit(what, size, devices // size, most)
    yield Unit(what, 1, devices % size)


def _place(unit: Unit, left: dict[str, int]) -> list[str]:
    """The nodes of a unit's devices, which are taken out of `left`: whole units first, then what fits nowhere whole."""
    found: list[str] = []
    wanted = unit.count
    for most in (unit.most, None):  # where nodes are too few, some take more
        for node in left:
            fitting = min(wanted, left[node] // unit.size, wanted if most is None else most)
            found += [node] * (fitting * unit.size)
            left[node] -= fitting * unit.size
            wanted -= fitting
    for node in left:
        single = min(unit.count * unit.size - len(found), left[node])
        found += [node] * single
        left[node] -= single
    return found


def _trainer_nodes(args: LayoutArgs, nodes: Sequence[str]) -> Sequence[str]:
    return nodes[: args.actor_world_size] if args.trains else ()


def _engine_nodes(args: LayoutArgs, nodes: Sequence[str]) -> Sequence[str]:
    first = 0 if args.colocate or not args.trains else args.actor_world_size
    return nodes[first : first + args.num_engines * args.rollout_num_gpus_per_engine]


def _first_split(nodes: Sequence[str], size: int) -> list[str]:
    """The nodes of the first group of `size` neighbours that lie on several; [] if none does."""
    for first in range(0, len(nodes), size):
        found = list(dict.fromkeys(nodes[first : first + size]))
        if len(found) > 1:
            return found
    return []


def _first_uneven(nodes: Sequence[str], size: int) -> str | None:
    """How many devices the first group of `size` neighbours has on each node, if those are not equal parts."""
    for first in range(0, len(nodes), size):
        runs = [(node, len(list(run))) for node, run in itertools.groupby(nodes[first : first + size])]
        if len({count for _, count in runs}) > 1 or len({node for node, _ in runs}) < len(runs):
            return ", then ".join(f"{count} on {node}" for node, count in runs)
    return None


def _listed(free: Mapping[str, int]) -> str:
    return ", ".join(f"{count} on {node}" for node, count in free.items()) or "none"
