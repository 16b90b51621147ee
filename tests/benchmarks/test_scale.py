"""The verdict of `benchmarks/scale.py`, and what its layouts move."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale import Size, make_queries, summary, verdict
from benchmarks.scaling.layouts import LAYOUTS, MODELS, Layout, step_tokens, traffic, write_model


def size(engines: int, in_flight: int, seconds: float, *, workers: int = 1, manager: float = 2.0) -> Size:
    cpu = {"manager": manager, "hooks": 8.0 * (workers > 1), "retriever": 1.0, "scripted_engines": 1.0}
    step = {name: value * in_flight / 1000 for name, value in cpu.items()}
    step |= {"seconds": seconds, "searches": float(in_flight)}
    return summary(engines, workers, in_flight, 7, [step] * 2, 0.5)


def test_the_verdict_names_where_speed_stops_growing() -> None:
    sizes = [size(1, 256, 4.0), size(4, 1024, 4.5), size(16, 4096, 12.0), size(64, 4096, 12.0)]
    assert sizes[1].trajectories_per_second == pytest.approx(1024 / 4.5)
    assert sizes[1].events_per_second == pytest.approx(3 * 1024 / 4.5)
    assert (sizes[1].manager, sizes[1].manager_core) == (pytest.approx(2.0), pytest.approx(1024 / 500 / 4.5))
    assert verdict(sizes) == (
        "speed grows with what is in flight up to 4 engines and 1024 trajectories; at 2.00 CPU s per 1,000, one "
        "process carries 500 trajectories/s at most"
    )
    assert "up to 64 engines" in verdict([sizes[0], sizes[1], size(16, 4096, 4.5), size(64, 4096, 4.5)])


def test_the_busiest_process_says_what_workers_carry() -> None:
    assert [size(1, 256, 4.0, workers=workers).carries for workers in (1, 2, 4, 8)] == [500, 250, 500, 500]
    last = size(64, 4096, 4.5, workers=4, manager=1.0)
    assert verdict([last]).endswith("at 9.00 CPU s per 1,000, a manager and 4 workers carry 500 trajectories/s at most")


def test_queries_differ() -> None:
    assert len(set(make_queries(12_000))) == 12_000  # more than there are passages


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_moves_less_on_each_gpu_when_there_are_more(layout: Layout, tmp_path: Path) -> None:
    args = layout.args(write_model(layout.model, tmp_path))  # ValueError if the layout does not fit the model
    moved = traffic(args, step_tokens(args))
    assert moved["sync"] < 2 * float(layout.model.partition("B")[0]) * 1e9 * 1.05
    assert (moved["PP"] > 0, moved["CP"] > 0) == (layout.pipeline > 1, layout.context > 1)
    assert moved["TP"] == pytest.approx(traffic(args, 2 * step_tokens(args))["TP"] / 2)


def test_a_layer_of_experts_by_hand(tmp_path: Path) -> None:
    """Qwen3-30B-A3B with TP 4 and EP 8: 1,000 tokens of 2,048 values in bf16 are 4,096,000 bytes."""
    args = LAYOUTS[0].args(write_model("30B-A3B", tmp_path))
    moved = traffic(args, 1000)
    assert moved["TP"] == 48 * 9 * 4_096_000 * 3 / 4  # three forward passes of two, a backward one of three
    assert moved["EP"] == 48 * 4 * 2 * 8 * 4_096_000 / 4 * 7 / 8
    assert MODELS["30B-A3B"]["num_experts_per_tok"] == 8
