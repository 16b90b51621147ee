"""When a process is taken for lost, and how often it may be started again."""

from __future__ import annotations

from sleuth.cluster.lives import SILENT_SECONDS, Lives


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_has_ended_is_lost_at_once_and_what_is_silent_after_a_while() -> None:
    clock = Clock()
    lives = Lives(1, clock)
    assert lives.is_lost(0, runs=False, trouble="was killed")
    assert not lives.is_lost(1, runs=True, trouble="is stopped")
    clock.now = SILENT_SECONDS - 1
    assert not lives.is_lost(1, runs=True, trouble="is stopped")
    assert not lives.is_lost(2, runs=True, trouble=None)
    clock.now = SILENT_SECONDS
    assert lives.is_lost(1, runs=True, trouble="is stopped")


def test_an_answer_in_between_counts() -> None:
    clock = Clock()
    lives = Lives(1, clock)
    assert not lives.is_lost(0, runs=True, trouble="does not answer")
    clock.now = SILENT_SECONDS - 1
    assert not lives.is_lost(0, runs=True, trouble=None)
    clock.now = SILENT_SECONDS + 1
    assert not lives.is_lost(0, runs=True, trouble="does not answer")


def test_each_process_has_its_own_number_of_lives() -> None:
    lives = Lives(2)
    assert [lives.use(0) for _ in range(3)] == [1, 2, None]
    assert lives.use(1) == 1
    assert Lives(0).use(0) is None
