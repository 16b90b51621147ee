"""What every search backend shares: errors with a type, retries, and one HTTP session per event loop."""

from __future__ import annotations

import asyncio
import email.utils
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import lru_cache
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import aiohttp
import tenacity

from sleuth.retries import failure, with_retries

logger = logging.getLogger(__name__)

FIRST_WAIT_SECONDS = 0.25
MAX_WAIT_SECONDS = 20.0
RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})

SearchErrorKind = Literal["timeout", "connection", "rate_limit", "status", "response", "backend"]
T = TypeVar("T")


class SearchError(RuntimeError):
    """A search failed. `kind` says how, for counting; `retryable`, whether another attempt may help.

    `retry_after` is how many seconds the server asked to wait, if it did.
    """

    def __init__(
        self, message: str, kind: SearchErrorKind, *, retryable: bool = False, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind: SearchErrorKind = kind
        self.retryable = retryable
        self.retry_after = retry_after


def check_http_url(url: str) -> str:
    """The URL itself; ValueError if nothing could be asked under it."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and not re.search(r"\s", url) and parts.port != 0:
            return url
    except ValueError:  # of a port or an IPv6 address
        pass
    raise ValueError("expected a URL such as http://127.0.0.1:8000/retrieve")


async def request_text(method: str, url: str, *, timeout: float, hidden: str | None = None, **options: Any) -> str:
    """The body of an answer with status 200, as UTF-8, which JSON is; SearchError for everything else.

    Messages name the URL and what was answered, never the request's headers or body. `hidden` is a secret that an
    answer could repeat: it is taken out.
    """
    session = await shared_session()
    try:
        async with session.request(method, url, timeout=_within(timeout), **options) as response:
            text = (await response.read()).decode("utf-8", "replace")
            text = text.replace(hidden, "***") if hidden else text
    except TimeoutError:
        raise SearchError(f"{url}: no answer within {timeout} s", "timeout", retryable=True) from None
    except aiohttp.InvalidURL:
        raise SearchError(f"{url}: not a URL; expected http://host:port/path", "connection") from None
    except (aiohttp.ClientError, OSError) as error:
        raise SearchError(f"{url}: {error or type(error).__name__}", "connection", retryable=True) from None
    if response.status != 200:
        raise status_error(response, url, text)
    return text


@lru_cache(maxsize=8)
def _within(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)


def status_error(response: aiohttp.ClientResponse, url: str, text: str) -> SearchError:
    """The error for an answer with another status than 200; it quotes the beginning of `text`."""
    status = response.status
    return SearchError(
        f"{url}: status {status}: {text[:200]!r}",
        "rate_limit" if status == 429 else "status",
        retryable=status in RETRYABLE_STATUS,
        retry_after=_seconds(response.headers.get("Retry-After")),
    )


def _seconds(retry_after: str | None) -> float | None:
    """A Retry-After header, seconds or a date, in seconds from now; None if there is none to be understood."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return None


async def with_search_retries(attempt: Callable[[], Awaitable[T]], retries: int) -> T:
    """What the attempt returns; its last SearchError after `retries` further attempts.

    Waits grow exponentially, each at least half of what it is at most, or are as long as the server asked; none exceeds
    MAX_WAIT_SECONDS.
    """
    return await with_retries(
        attempt,
        is_transient=lambda error: isinstance(error, SearchError) and error.retryable,
        attempts=retries + 1,
        wait=_wait_seconds,
        before_sleep=lambda state: logger.debug("search attempt %d failed: %s", state.attempt_number, failure(state)),
    )


_exponential = tenacity.wait_exponential(multiplier=FIRST_WAIT_SECONDS, max=MAX_WAIT_SECONDS)


def _wait_seconds(state: tenacity.RetryCallState) -> float:
    error = failure(state)
    asked = error.retry_after if isinstance(error, SearchError) else None
    if asked is not None:
        return min(asked, MAX_WAIT_SECONDS)
    return _exponential(state) * random.uniform(0.5, 1.0)  # not all at once, and never almost none


def search_session() -> aiohttp.ClientSession:
    """A session for backends; their callers bound how many requests are under way."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),  # a search is on its own
    )


MakeSession = Callable[[], aiohttp.ClientSession]
_sessions: dict[
    tuple[asyncio.AbstractEventLoop, MakeSession], tuple[AsyncIterator[aiohttp.ClientSession], aiohttp.ClientSession]
] = {}


async def shared_session(make: MakeSession = search_session) -> aiohttp.ClientSession:
    """This event loop's one session of its kind; closed when the loop shuts down its asynchronous generators."""
    key = asyncio.get_running_loop(), make
    if key not in _sessions or _sessions[key][1].closed:
        for ended in [other for other in _sessions if other[0].is_closed()]:
            del _sessions[ended]
        holder = _hold_session(make)
        _sessions[key] = holder, await anext(holder)
    return _sessions[key][1]


async def _hold_session(make: MakeSession) -> AsyncIterator[aiohttp.ClientSession]:
    async with make() as session:
        yield session
