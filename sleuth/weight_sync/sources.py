"""Which trainer rank serves which rank of which engine, where the weights do not travel over a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """Where one engine gets its weights.

    `ranks[i]`: the trainer rank that serves the engine's rank i. `shares_gpu`: the engine sees the GPUs of all of them,
    so that buckets stay there. `same_node`: they run on the engine's node; where not, buckets travel in requests.
    """

    ranks: tuple[int, ...]
    shares_gpu: bool = False
    same_node: bool = True


def sources_of(
    trainer: Sequence[int],
    engines: Sequence[int],
    per_engine: int,
    *,
    on_gpu: bool,
    nodes: Mapping[int, str] | None = None,
) -> list[Source]:
    """The source of each engine. `trainer[rank]` is a rank's device, `engines` are those of engine after engine.

    An engine's rank is served by the trainer rank on its own device. Where that has none, but another of the engine's
    devices has, by that one: all ranks of an engine see all its GPUs, so one reads from the other's. Engines that
    share no device with the trainer are dealt out to its ranks on their node, and read from host memory; where there
    is none, rank 0 sends. On a CPU an engine is one process, whatever `per_engine` says. `nodes`: the node of each
    device (None: all are on one); those of an engine are on one node.
    """
    found = []
    for first in range(0, len(engines), per_engine):
        devices = engines[first : first + per_engine] if on_gpu else engines[first : first + 1]
        own = [trainer.index(device) for device in devices if device in trainer]
        beside = [rank for rank, device in enumerate(trainer) if not nodes or nodes[device] == nodes[devices[0]]]
        if own:
            ranks = [trainer.index(device) if device in trainer else own[0] for device in devices]
            found.append(Source(tuple(ranks), shares_gpu=on_gpu))
        elif beside:
            rank = beside[first // per_engine % len(beside)]
            found.append(Source((rank,) * len(devices)))
        else:
            found.append(Source((0,) * len(devices), same_node=False))
    return found
