"""The order of things in the loop, with a run that only notes what it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import train


class Noting:
    """Takes part as trainer, rollout and tracker; `done` says what was asked for in which step."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.step = 0

    def __getattr__(self, name: str) -> Any:
        def note(*args: Any) -> Any:
            self.step = args[0] if name == "generate" else self.step
            self.done.append(f"{name} {self.step}")
            return SimpleNamespace(shards=[], metrics={}) if name == "generate" else {}

        return note

    @contextmanager
    def memory_lent(self) -> Iterator[None]:
        self.done.append(f"release_memory {self.step}")
        yield
        self.done.append(f"resume_memory {self.step}")


@pytest.mark.parametrize(
    ("interval", "evaluation", "synced"),
    [(1, None, [0, 1, 2, 3, 4, 5]), (2, None, [0, 2, 4, 5]), (4, 3, [0, 3, 4, 5]), (9, None, [0, 5])],
)
def test_weights_go_to_the_engines_at_intervals_before_evaluations_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, interval: int, evaluation: int | None, synced: list[int]
) -> None:
    args: Any = SimpleNamespace(
        num_rollout=5,
        eval_before_train=False,
        eval_interval=evaluation,
        update_weights_interval=interval,
        save=None,
        save_interval=1,
        max_logprob_diff=None,
    )
    noting: Any = Noting()
    monkeypatch.setattr(train, "sync_weights", lambda *args, max_difference: noting.sync_weights(args[2]))
    train.train(args, SimpleNamespace(trainer=noting, rollout=noting, steps_done=0), noting)  # type: ignore[arg-type]
    assert [entry for entry in noting.done if entry.startswith("sync")] == [f"sync_weights {step}" for step in synced]
    assert noting.done.index("release_memory 1") < noting.done.index("train 1") < noting.done.index("resume_memory 1")
    for step in {3, 5} if evaluation else ():
        assert noting.done.index(f"sync_weights {step}") < noting.done.index(f"evaluate {step}")
