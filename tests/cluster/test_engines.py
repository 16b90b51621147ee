"""The engines' side of a run, as far as it needs no engine: when they start, and which error is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from sleuth.cluster.engines import EngineDiedError, Engines
from sleuth.cluster.lives import Lives
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
            return Answer({"look": (self.answer is None, self.answer), "restart": "http://new"}.get(name))

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
    made.waiter, made._lives, made._gone = Waiter(), Lives(1), set()
    made._make = [lambda actor=actor: actor for actor in actors]  # type: ignore[misc]
    made._urls = [f"http://{index}" for index in range(len(actors))]
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


KILLED = "the engine at URL was killed by signal 9"


def test_an_engine_that_ended_is_started_again_as_often_as_it_may(notes: list[Any], caplog: Any) -> None:
    group = engines(ScriptedActor(notes), ScriptedActor(notes, trouble=KILLED), colocate=False)
    assert group.lost() == {1: KILLED}
    assert group.start_again(group.lost()) == ["http://0", "http://new"]
    assert [note for note in notes if note == ("restart",)] == [("restart",)]
    assert f"engine 1: {KILLED}; it is started again (1 of at most 1 times)" in caplog.text
    with pytest.raises(EngineDiedError, match=r"engine 1: .*; it may not be started again \(--process-restarts\)"):
        group.start_again(group.lost())


def test_engines_that_share_gpus_with_a_trainer_are_not_started_again(notes: list[Any]) -> None:
    group = engines(ScriptedActor(notes, trouble=KILLED))
    with pytest.raises(EngineDiedError, match=f"^engine 0: {KILLED}; start again$"):
        group.start_again(group.lost())


def test_an_actor_that_ended_is_made_anew(notes: list[Any]) -> None:
    dead = ScriptedActor(notes)
    dead.answer = None
    group = engines(dead, colocate=False)
    group._make = [lambda: ScriptedActor(notes)]
    group._actors[0] = Ended()
    assert group.lost() == {0: "its actor ended (RayError)"}
    group.start_again(group.lost())
    assert isinstance(group._actors[0], ScriptedActor)


class Ended:
    """Stands for an actor whose process has ended."""

    look = SimpleNamespace(remote=lambda: Answer(ray.exceptions.RayError("dead")))
