"""Which trainer rank serves which rank of which engine."""

from __future__ import annotations

import pytest

from sleuth.weight_sync.sources import Source, sources_of


@pytest.mark.parametrize(
    ("trainer", "engines", "size", "expected"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3], 2, [((0, 1), True), ((2, 3), True)]),
        ([0, 1, 2, 3], [0, 1], 1, [((0,), True), ((1,), True)]),  # ranks 2 and 3 serve none
        ([0, 1], [0, 1, 2, 3], 4, [((0, 1, 0, 0), True)]),  # an engine that is wider than the trainer
        ([0, 1], [0, 1, 2, 3], 2, [((0, 1), True), ((1, 1), False)]),  # one engine beside the trainer
        ([0, 1], [2, 3, 4], 1, [((0,), False), ((1,), False), ((0,), False)]),  # engines of their own
        ([7, 5], [5, 7], 2, [((1, 0), True)]),
    ],
)
def test_gpus_that_are_shared_serve_themselves(
    trainer: list[int], engines: list[int], size: int, expected: list[tuple[tuple[int, ...], bool]]
) -> None:
    found = sources_of(trainer, engines, size, on_gpu=True)
    assert [(source.ranks, source.shares_gpu) for source in found] == expected


def test_engines_are_served_on_their_own_node_or_in_requests() -> None:
    nodes = {0: "a", 1: "b", 2: "b", 3: "a", 4: "b", 5: "c"}
    beside = sources_of([0, 1, 2], [3, 4, 5], 1, on_gpu=True, nodes=nodes)
    assert beside == [Source((0,)), Source((2,)), Source((0,), same_node=False)]
    colocated = sources_of([0, 1], [0, 1, 5], 1, on_gpu=False, nodes=nodes)
    assert colocated == [Source((0,)), Source((1,)), Source((0,), same_node=False)]


def test_the_ranks_of_an_engine_on_two_nodes_are_each_served_on_their_own() -> None:
    nodes = dict(enumerate("aabbaabb"))
    assert sources_of([0, 1, 2, 3], [0, 1, 2, 3], 4, on_gpu=True, nodes=nodes) == [Source((0, 1, 2, 3), True)]
    assert sources_of([0, 1, 2, 3], [0, 1, 2, 3], 4, on_gpu=False, nodes=nodes) == [Source((0, 2))]
    # Half of the devices are the trainer's; on node b the trainer has others.
    assert sources_of([0, 6], [0, 1, 2, 3], 4, on_gpu=True, nodes=nodes) == [Source((0, 0, 1, 1))]
    assert sources_of([0, 1], [0, 1, 2, 3], 4, on_gpu=True, nodes=nodes) == [Source((0,) * 4, same_node=False)]


def test_on_a_cpu_an_engine_is_one_process_that_reads_from_host_memory() -> None:
    assert sources_of([0, 1, 2, 3], [0, 1, 2, 3], 2, on_gpu=False) == [Source((0,)), Source((2,))]
    assert sources_of([0, 1], [2, 3, 4, 5], 2, on_gpu=False) == [Source((0,)), Source((1,))]
