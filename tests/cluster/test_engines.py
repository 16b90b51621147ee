"""The engines' side of a run, as far as it needs no engine: when they start, and which error is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from sleuth.cluster.engines import EngineDiedError, Engines
from sleuth.cluster.waiting import Waiter


class ScriptedActor:
    """Notes what it is told; a call whose name is in `failing` raises. Calls look as Ray's do."""

    def __init__(self, notes: list[Any], failing: tuple[str, ...] = (), trouble: str | None = None) -> None:
        self.notes, self.failing, self.answer = notes, failing, trouble

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Any:
            self.notes.append((name, *args))
            if name in self.failing:
                return Answer(RuntimeError(name))
            return Answer(self.answer if name == "trouble" else None)

        return SimpleNamespace(remote=remote)


class Answer:
    """Stands for a reference to what an actor answers."""

    def __init__(self, value: Any) -> None:
        self.value = value


def get(answers: Any, timeout: float | None = None) -> Any:
    """As ray.get: raises what a call raised."""
    if isinstance(answers, Answer):
        return get([answers])[0]
    values = [answer.value for answer in answers]
    for answer in values:
        if isinstance(answer, Exception):
            raise answer
    return values


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda answers, num_returns, timeout: (answers, []))
    return []


def engines(*actors: ScriptedActor, colocate: bool = True, on_gpu: bool = True) -> Engines:
    made = object.__new__(Engines)
    made.args, made._router = SimpleNamespace(router=False), None  # type: ignore[assignment]
    made.waiter = Waiter()
    made._actors, made._on_gpu, made.share_gpus = list(actors), on_gpu, colocate and on_gpu
    made._starting = [] if made.share_gpus else made._start()
    return made


@pytest.mark.parametrize(("colocate", "on_gpu"), [(True, True), (False, True), (True, False)])
def test_engines_that_share_gpus_start_when_they_are_waited_for(notes: list[Any], colocate: bool, on_gpu: bool) -> None:
    group = engines(ScriptedActor(notes), ScriptedActor(notes), colocate=colocate, on_gpu=on_gpu)
    assert notes == ([] if colocate and on_gpu else [("start",)] * 2)
    group.wait_until_ready()
    assert notes == [("start",)] * 2


def test_what_fails_because_of_a_dead_engine_names_it(notes: list[Any]) -> None:
    group = engines(ScriptedActor(notes), ScriptedActor(notes, trouble="the engine at URL was killed by signal 9"))
    with pytest.raises(EngineDiedError, match=r"^engine 1: the engine at URL was killed .*; start again$"):
        raise_within(group, ray.exceptions.RayError("refused"))
    with pytest.raises(ray.exceptions.RayError, match="refused"):
        raise_within(engines(ScriptedActor(notes)), ray.exceptions.RayError("refused"))


def raise_within(group: Engines, error: Exception) -> None:
    with group.deaths_explained():
        raise error
