"""Retries with tenacity's waits; a call that succeeds at once costs nothing extra."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import tenacity

T = TypeVar("T")


async def with_retries(
    attempt: Callable[[], Awaitable[T]],
    *,
    is_transient: Callable[[BaseException], bool],
    attempts: int,
    wait: Callable[[tenacity.RetryCallState], float],
    before_sleep: Callable[[tenacity.RetryCallState], Any],
) -> T:
    """Call `attempt()` at most `attempts` times. Returns its first result; raises its last error if all fail.

    An error that is not transient is raised at once. `wait` gives the seconds before the next attempt; `before_sleep`
    is called before that wait, to report the failure.
    """
    try:
        return await attempt()  # most succeed: setting up the retries costs as much as a request
    except Exception as error:
        failed = [error]
    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(is_transient),
        stop=tenacity.stop_after_attempt(attempts),
        wait=wait,
        before_sleep=before_sleep,
        reraise=True,
    )
    async for trial in retrying:
        with trial:
            if failed:
                raise failed.pop()  # the first attempt, which is over
            return await attempt()
    raise AssertionError("tenacity returns or raises")


def failure(state: tenacity.RetryCallState) -> BaseException | None:
    """The error of the attempt that `state` describes."""
    return state.outcome.exception() if state.outcome else None


class RetryTeller:
    """Logs failed attempts as `name attempt 1: error`, at most one in `seconds` as a warning.

    Where a service is down, all its requests fail at once. The next warning says how many it stands for.
    """

    def __init__(self, logger: logging.Logger, name: str, seconds: float) -> None:
        self._logger, self._name, self._seconds = logger, name, seconds
        self._next = 0.0
        self._untold = 0

    def __call__(self, state: tenacity.RetryCallState) -> None:
        """Tell of the attempt that `state` describes, before the wait for the next one."""
        text = f"{self._name} {state.attempt_number}: {failure(state)}"
        now = time.monotonic()
        if now < self._next:
            self._untold += 1
            self._logger.info("%s", text)
            return
        more = f" (and {self._untold} more failed attempts since the last such line)" if self._untold else ""
        self._next, self._untold = now + self._seconds, 0
        self._logger.warning("%s%s", text, more)
