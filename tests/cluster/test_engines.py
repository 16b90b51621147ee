"""The engines' side of a run, as far as it needs no engine: who has the memory, and which error is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from sleuth.cluster.engines import EngineDiedError, Engines, lent_memory

ALL, KV = None, ("kv_cache", "cuda_graph")


class ScriptedActor:
    """Notes what it is told; a call whose name is in `failing` raises. Calls look as Ray's do."""

    def __init__(self, notes: list[Any], failing: tuple[str, ...] = (), trouble: str | None = None) -> None:
        self.notes, self.failing, self.answer = notes, failing, trouble

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Any:
            self.notes.append((name, *args))
            if name in self.failing:
                return RuntimeError(name)
            return self.answer if name == "trouble" else None

        return SimpleNamespace(remote=remote)


def get(answers: list[Any], timeout: float | None = None) -> list[Any]:
    """As ray.get: raises what a call raised."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(ray, "get", get)
    return []


def engines(*actors: ScriptedActor, colocate: bool = True, on_gpu: bool = True, interval: int = 1) -> Engines:
    made = object.__new__(Engines)
    made.args = SimpleNamespace(colocate=colocate, update_weights_interval=interval, save="SAVE")  # type: ignore[assignment]
    made._actors, made._on_gpu = list(actors), on_gpu
    return made


def test_engines_keep_weights_that_the_next_sync_may_not_bring_back() -> None:
    args: Any = SimpleNamespace(update_weights_interval=1)
    assert lent_memory(args) == ALL
    args.update_weights_interval = 2
    assert lent_memory(args) == KV


@pytest.mark.parametrize(("interval", "parts"), [(1, ALL), (3, KV)])
def test_memory_is_lent_only_within(notes: list[Any], interval: int, parts: tuple[str, ...] | None) -> None:
    with engines(ScriptedActor(notes), interval=interval).memory_lent():
        notes.append("train")
    assert notes == [("release_memory", parts), "train", ("resume_memory", parts)]


@pytest.mark.parametrize(("colocate", "on_gpu"), [(False, True), (True, False)])
def test_memory_that_is_not_shared_is_not_lent(notes: list[Any], colocate: bool, on_gpu: bool) -> None:
    with engines(ScriptedActor(notes), colocate=colocate, on_gpu=on_gpu).memory_lent():
        pass
    assert notes == []


@pytest.mark.parametrize("failing", [(), ("resume_memory",)])
def test_after_an_error_memory_goes_back_and_the_error_is_told(notes: list[Any], failing: tuple[str, ...]) -> None:
    with (
        pytest.raises(ValueError, match="a NaN loss"),
        engines(ScriptedActor(notes, failing)).memory_lent(),
    ):
        raise ValueError("a NaN loss")
    assert notes == [("release_memory", ALL), ("resume_memory", ALL)]


def test_memory_that_only_some_engines_lent_goes_back(notes: list[Any]) -> None:
    with (
        pytest.raises(RuntimeError, match="release_memory"),
        engines(ScriptedActor(notes), ScriptedActor(notes, ("release_memory",))).memory_lent(),
    ):
        notes.append("train")
    assert notes == [("release_memory", ALL)] * 2 + [("resume_memory", ALL)] * 2


def test_memory_that_does_not_come_back_is_an_error(notes: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="resume"), engines(ScriptedActor(notes, ("resume_memory",))).memory_lent():
        pass


def test_an_interruption_does_not_wait_for_the_engines(notes: list[Any]) -> None:
    with pytest.raises(KeyboardInterrupt), engines(ScriptedActor(notes)).memory_lent():
        raise KeyboardInterrupt
    assert notes == [("release_memory", ALL)]


def test_what_fails_because_of_a_dead_engine_names_it(notes: list[Any]) -> None:
    group = engines(ScriptedActor(notes), ScriptedActor(notes, trouble="the engine at URL was killed by signal 9"))
    with pytest.raises(EngineDiedError, match=r"^engine 1: the engine at URL was killed .*--load SAVE goes on"):
        raise_within(group, ray.exceptions.RayError("refused"))
    with pytest.raises(ray.exceptions.RayError, match="refused"):
        raise_within(engines(ScriptedActor(notes)), ray.exceptions.RayError("refused"))


def raise_within(group: Engines, error: Exception) -> None:
    with group.deaths_explained():
        raise error
