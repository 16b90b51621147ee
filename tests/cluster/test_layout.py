"""On which nodes a run's devices lie: what must share a node does, or the run is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sleuth.cluster.layout import LayoutError, crossing, lay_out, parts


def run(
    trainer: tuple[int, int] = (1, 1),
    engines: tuple[int, int] = (0, 1),
    *,
    colocate: bool = False,
    tensor: int = 1,
    across: bool = False,
) -> Any:
    """A trainer on so many nodes with so many GPUs each, and so many engines of so many GPUs."""
    world, rollout = trainer[0] * trainer[1], engines[0] * engines[1]
    return SimpleNamespace(
        actor_world_size=world,
        actor_num_gpus_per_node=trainer[1],
        trains=world > 0,
        num_engines=engines[0],
        rollout_num_gpus_per_engine=engines[1],
        colocate=colocate,
        total_gpus=max(world, rollout) if colocate else world + rollout,
        tensor_model_parallel_size=tensor,
        allow_tensor_parallel_across_nodes=across,
    )


@pytest.mark.parametrize(
    ("args", "free", "expected"),
    [
        (run((2, 2), (4, 1), colocate=True), {"a": 4, "b": 4}, "aabb"),  # --actor-num-nodes is heeded
        (run((2, 2), (4, 1), colocate=True), {"a": 8}, "aaaa"),  # where it can be
        (run((1, 4), (2, 2)), {"a": 4, "b": 4}, "aaaabbbb"),
        (run((1, 2), (2, 4)), {"a": 8, "b": 8}, "aaaaaabbbb"),  # an engine of 4 lies on one node
        (run((1, 2), (1, 4), colocate=True), {"a": 3, "b": 8}, "bbbb"),
        (run((1, 4), (0, 1), tensor=2), {"a": 3, "b": 3}, "aabb"),  # holes of other runs
        (run((1, 1), (2, 1)), {"a": 1, "b": 2}, "bba"),
        (run((0, 1), (2, 2)), {"a": 3, "b": 3}, "aabb"),  # engines alone
    ],
)
def test_what_belongs_together_shares_a_node(args: Any, free: dict[str, int], expected: str) -> None:
    assert "".join(lay_out(args, free)) == expected


def test_tensor_parallel_ranks_on_two_nodes_are_refused_unless_allowed() -> None:
    free = {"10.0.0.1": 2, "10.0.0.2": 2}
    with pytest.raises(LayoutError) as error:
        lay_out(run((2, 2), tensor=4), free)
    for words in ("expected the 4 tensor-parallel ranks", "on 10.0.0.1 and 10.0.0.2", "add --allow-tensor", "free dev"):
        assert words in str(error.value)
    assert len(lay_out(run((2, 2), tensor=4, across=True), free)) == 4


def test_an_engine_on_two_nodes_is_refused_unless_allowed_and_even() -> None:
    with pytest.raises(
        LayoutError, match=r"expected the 4 GPUs of an engine on one node, found them on a and b.* add "
    ):
        lay_out(run((2, 2), (1, 4), colocate=True), {"a": 2, "b": 2})
    assert lay_out(run((2, 2), (1, 4), colocate=True, across=True), {"a": 2, "b": 2}) == ["a", "a", "b", "b"]
    assert lay_out(run((1, 2), (1, 4), across=True), {"a": 2, "b": 2, "c": 2}) == [*"aabbcc"]
    with pytest.raises(LayoutError, match=r"of an engine in equal parts on its nodes, found 3 on a, then 1 on b"):
        lay_out(run((2, 2), (1, 4), colocate=True, across=True), {"a": 3, "b": 1})


def test_too_few_devices_are_told_by_node() -> None:
    with pytest.raises(LayoutError, match=r"expected 5 free devices, found 2 on a, 1 on b; lower"):
        lay_out(run((1, 5)), {"a": 2, "b": 1})


def test_the_parts_of_a_node_name_ranks_and_engines() -> None:
    args = run((1, 2), (2, 2))
    found = parts(args, lay_out(args, {"a": 4, "b": 4}))
    described = {node: [(list(p.devices), list(p.ranks), p.engine) for p in on] for node, on in found.items()}
    assert described == {"a": [([0, 1], [0, 1], None), ([2, 3], [], 0)], "b": [([4, 5], [], 1)]}


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 4)),
    st.tuples(st.integers(0, 6), st.integers(1, 4)),
    st.booleans(),
    st.integers(1, 4),
    st.lists(st.integers(0, 8), min_size=1, max_size=4),
)
def test_every_layout_fits_and_crosses_no_node(
    trainer: tuple[int, int], engines: tuple[int, int], colocate: bool, tensor: int, sizes: list[int]
) -> None:
    args = run(trainer, engines, colocate=colocate, tensor=tensor)
    free = {f"n{i}": size for i, size in enumerate(sizes)}
    try:
        nodes = lay_out(args, free)
    except LayoutError:
        return
    assert len(nodes) == args.total_gpus
    assert all(nodes.count(node) <= free[node] for node in free)
    assert not list(crossing(args, nodes))
    assert sum(len(part.devices) for on in parts(args, nodes).values() for part in on) == args.total_gpus
