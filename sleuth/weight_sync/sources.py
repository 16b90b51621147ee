"""Which trainer rank serves which rank of which engine, where the weights do not travel over a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """Where one engine gets its weights.

    `ranks[i]`: the trainer rank that serves the engine's rank i. `shares_gpu`: the engine sees the GPUs of all of them,
    so that buckets stay there. `same_node`: each runs on the node of the rank that it serves; where not, buckets travel
    in requests.
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
    devices on the same node has, by that one: there all ranks of an engine see all its GPUs, so one reads from the
    other's. Engine ranks that share no device with the trainer are dealt out, by engine, to its ranks on their node,
    and read from host memory; where a node has none, rank 0 sends to the whole engine. On a CPU an engine is one
    process on each of its nodes, whatever `per_engine` says. `nodes`: the node of each device (None: all are on one).
    """
    node_of = nodes or dict.fromkeys((*trainer, *engines), "")
    found = []
    for first in range(0, len(engines), per_engine):
        own = engines[first : first + per_engine]
        firsts = {node_of[device]: device for device in reversed(own)}
        devices = own if on_gpu else [device for device in own if device in firsts.values()]
        sharing, ranks = True, []
        for device in devices:
            here = [rank for rank, other in enumerate(trainer) if node_of[other] == node_of[device]]
            shared = [rank for rank in here if trainer[rank] in devices]
            if device in trainer:
                ranks.append(trainer.index(device))
            elif shared:
                ranks.append(shared[0])
            elif here:
                sharing = False
                ranks.append(here[first // per_engine % len(here)])
        if len(ranks) < len(devices):
            found.append(Source((0,) * len(devices), same_node=False))
        else:
            found.append(Source(tuple(ranks), shares_gpu=on_gpu and sharing))
    return found
