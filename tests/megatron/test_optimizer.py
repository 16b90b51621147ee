"""The learning-rate schedule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sleuth.megatron.optimizer import learning_rate


def settings(**changes: Any) -> Any:
    values = {"lr": 1.0, "min_lr": 0.1, "lr_warmup_steps": 4, "lr_decay_steps": 14, "lr_decay_style": "linear"}
    return SimpleNamespace(**(values | changes))


def test_warm_up_moves_from_the_first_step() -> None:
    assert [learning_rate(settings(), step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(("style", "middle"), [("constant", 1.0), ("linear", 0.55), ("cosine", 0.55)])
def test_decay(style: str, middle: float) -> None:
    args = settings(lr_decay_style=style)
    assert learning_rate(args, 4) == pytest.approx(1.0)
    assert learning_rate(args, 9) == pytest.approx(middle)
    for step in (14, 1000):
        assert learning_rate(args, step) == pytest.approx(1.0 if style == "constant" else 0.1)


def test_cosine_is_slow_at_both_ends() -> None:
    linear, cosine = (settings(lr_decay_style=style) for style in ("linear", "cosine"))
    assert learning_rate(cosine, 5) > learning_rate(linear, 5)
    assert learning_rate(cosine, 13) < learning_rate(linear, 13)
