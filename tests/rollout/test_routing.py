"""Which engine the router picks: the one that holds the beginning, unless it is busier or out."""

from __future__ import annotations

from contextlib import ExitStack

from sleuth.rollout.routing import OUT_SECONDS, Router, one_trajectory

A, B, C = "a", "b", "c"


class Busy(ExitStack):
    """Requests that stay under way until the test's end."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router

    def start(self, *ids: int) -> str:
        return self.enter_context(self.router.place(ids))


def ask(router: Router, *ids: int) -> str:
    with router.place(ids) as url:
        return url


def test_new_prompts_go_where_least_is_under_way() -> None:
    with Busy(Router([A, B, C], slack=4)) as busy:
        assert sorted(busy.start(prompt) for prompt in range(6)) == [A, A, B, B, C, C]


def test_all_turns_of_a_trajectory_go_to_one_engine() -> None:
    with Busy(Router([A, B], slack=2)) as busy:
        with one_trajectory():
            home = ask(busy.router, 1, 2)
        other = busy.start(9)
        assert other == home, "nothing is under way there any more"
        with one_trajectory():
            home = ask(busy.router, 1, 3)
            assert home != other
            busy.start(8)
            assert [ask(busy.router, *range(length)) for length in (3, 5, 7)] == [home] * 3


def test_the_first_turns_of_a_group_go_to_one_engine_within_the_slack() -> None:
    with Busy(Router([A, B], slack=4)) as busy:
        found = []
        for _ in range(8):
            with one_trajectory():
                found.append(busy.start(1, 2, 3))
        assert found == [A] * 5 + [B] * 3
        assert busy.start(4, 5) == B, "another prompt still goes to the less busy one"


def test_a_trajectory_leaves_an_engine_that_is_much_busier_and_stays_away() -> None:
    with Busy(Router([A, B], slack=1)) as busy, one_trajectory():
        assert ask(busy.router, 1) == A
        with Busy(busy.router) as others:
            for prompt in (1, 1):
                others.start(prompt)
            assert ask(busy.router, 1, 2) == B
        assert ask(busy.router, 1, 2, 3) == B, "its beginning lies there now"


def test_an_engine_that_failed_is_left_out_and_tried_again() -> None:
    now = 0.0
    router = Router([A, B], slack=4, clock=lambda: now)
    with one_trajectory():
        assert ask(router, 1) == A
        router.failed(A)
        assert [ask(router, prompt) for prompt in range(4)] == [B] * 4
    now = OUT_SECONDS
    with Busy(router) as busy:
        assert {busy.start(98), busy.start(99)} == {A, B}


def test_where_all_are_out_all_are_tried() -> None:
    router = Router([A, B], slack=4)
    for url in (A, B):
        router.failed(url)
    assert ask(router, 1) in (A, B)


def test_an_engine_that_is_gone_gets_nothing_and_a_new_one_does() -> None:
    router = Router([A, B], slack=4)
    with Busy(router) as busy:
        assert [busy.start(1), busy.start(2), busy.start(3)] == [A, B, A]
        router.use([B, C])
        router.failed(A)  # its requests fail only now
        assert [ask(router, prompt) for prompt in (4, 5)] == [C, C]
        assert busy.start(1) == C  # A was nearer
