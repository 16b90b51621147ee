"""Failed attempts are told, but not each of them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import tenacity

from sleuth import retries
from sleuth.retries import RetryTeller, with_retries


def fail(teller: RetryTeller, times: int) -> None:
    """A call that fails so often before it succeeds."""
    left = [times]

    async def attempt() -> None:
        if left[0]:
            left[0] -= 1
            raise ValueError("no answer within 30 s")

    never: Any = tenacity.wait_none()
    asyncio.run(with_retries(attempt, is_transient=lambda error: True, attempts=9, wait=never, before_sleep=teller))


def test_the_first_failure_is_told_and_the_next_one_says_how_many_were_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    teller = RetryTeller(logging.getLogger("test"), "failed search, attempt", seconds=30.0)
    now = 100.0
    monkeypatch.setattr(retries.time, "monotonic", lambda: now)
    fail(teller, 3)
    fail(teller, 1)
    now += 31.0
    fail(teller, 2)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "failed search, attempt 1: no answer within 30 s",
        "failed search, attempt 1: no answer within 30 s (and 3 more failed attempts since the last such line)",
    ]
