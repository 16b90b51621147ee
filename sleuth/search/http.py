"""What every search backend shares: errors with a type, retries, and one HTTP session per event loop."""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Literal, Protocol, Self, TypeVar

import aiohttp
import pydantic
import tenacity
from yarl import URL

from sleuth.activity import waiting_for
from sleuth.retries import RetryTeller, failure, with_retries
from sleuth.secrets import redact, without_passwords

logger = logging.getLogger(__name__)

FIRST_WAIT_SECONDS = 0.25
MAX_WAIT_SECONDS = 20.0
WARNING_SECONDS = 30.0
"""Between two warnings of failed attempts."""
MAX_ANSWER_BYTES = 32 * 1024 * 1024
"""Of an answer's body, decompressed: a hundred passages take less than one of these megabytes."""
MAX_REDIRECTS = 5
RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
QUERY_STATUS = frozenset({400, 413, 414, 422, 431, 451})
"""How servers refuse a query for what it says or how long it is. The rest of 4xx is about keys, addresses and rates."""
REDIRECT_STATUS = frozenset({301, 302, 303, 307, 308})
_UNLIMITED = aiohttp.ClientTimeout(total=None)

SearchErrorKind = Literal["timeout", "connection", "rate_limit", "status", "response", "backend"]
T = TypeVar("T")


class SearchError(RuntimeError):
    """A search failed. `kind` says how, for counting; `retryable`, whether another attempt may help.

    `retry_after` is how many seconds the server asked to wait, if it did.
    """

    def __init__(
        self, message: str, kind: SearchErrorKind, *, retryable: bool = False, retry_after: float | None = None
    ) -> None:
        super().__init__(redact(message))
        self.kind: SearchErrorKind = kind
        self.retryable = retryable
        self.retry_after = retry_after


class QueryError(ValueError):
    """The backend refused a query: the fault of its author, not of the backend.

    It is not a SearchError, so it is neither retried nor counted as a failure. `reason` is what the server said,
    without its address.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(redact(message))
        self.reason = redact(reason or message)


# --- Queries ---

_UNSENDABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffd]")


def clean_query(query: str) -> str:
    """The query in a form that can be sent; QueryError if nothing is left of it.

    Characters that no server can read become spaces: lone surrogates, U+FFFD, and control characters except whitespace.
    """
    if re.search("[\ud800-\udfff]", query):  # two that make a pair are one character
        query = query.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    cleaned = _UNSENDABLE.sub(" ", query).strip()
    if not cleaned:
        raise QueryError("the query is blank")
    return cleaned


def is_query_fault(error: BaseException) -> bool:
    """Whether an error that a user's own backend raised is the fault of the query rather than of the backend.

    It is for a QueryError, for a ValueError unless that is about the answer (JSON, text, pydantic) or the address, and
    for errors of HTTP clients (aiohttp, requests, httpx) that report a status in QUERY_STATUS.
    """
    status = getattr(error, "status", getattr(getattr(error, "response", None), "status_code", None))
    if isinstance(status, int):
        return status in QUERY_STATUS
    of_answers = (json.JSONDecodeError, UnicodeDecodeError, pydantic.ValidationError)
    return isinstance(error, ValueError) and not isinstance(error, (*of_answers, aiohttp.ClientError, OSError))


# --- Requests ---


async def request_text(method: str, url: str, *, timeout: float, hidden: str | None = None, **options: Any) -> str:
    """Send a request; returns the body of an answer with status 200, decoded as UTF-8 (the encoding of JSON).

    `timeout`: seconds, redirects and reading included. Messages name the URL and what was answered, never the
    headers or the body of the request. `hidden` is a secret that is removed from messages, should an answer repeat it.

    Raises QueryError for a status in QUERY_STATUS, SearchError for everything else: another status, no answer in
    time, more than MAX_ANSWER_BYTES, a redirect that would lose the query or lead a secret elsewhere.
    """
    name = without_passwords(url)
    try:
        async with asyncio.timeout(timeout):
            with waiting_for(f"search at {name}"):
                return await _request(method, url, name, hidden, options)
    except QueryError:
        raise
    except TimeoutError:
        raise SearchError(f"{name}: no answer within {timeout} s", "timeout", retryable=True) from None
    except ValueError as error:  # of aiohttp, which refuses URLs, proxies and headers so
        reason = "" if isinstance(error, aiohttp.InvalidURL) else f" ({_hide(str(error), hidden)})"
        raise SearchError(f"{name}: cannot be asked{reason}; expected http://host:port/path", "connection") from None
    except aiohttp.ClientHttpProxyError as error:  # its text would hold the proxy's password
        message = f"{name}: the proxy answered {error.status} {error.message!r}"
        raise SearchError(message, "connection", retryable=error.status in RETRYABLE_STATUS) from None
    except (aiohttp.ClientError, OSError) as error:
        permanent = isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.NonHttpUrlClientError)
        raise SearchError(f"{name}: {error or type(error).__name__}", "connection", retryable=not permanent) from None


async def _request(method: str, url: str, name: str, hidden: str | None, options: Mapping[str, Any]) -> str:
    session = await shared_session()
    secret = hidden or options.get("headers") or options.get("auth")
    target: str | URL = url
    for _ in range(MAX_REDIRECTS + 1):
        async with session.request(method, target, timeout=_UNLIMITED, allow_redirects=False, **options) as response:
            location = _hide(response.headers.get("Location", ""), hidden)
            if response.status in REDIRECT_STATUS and location:
                target = _redirected(response, location, name, bool(secret))
                continue
            text = _hide((await _read(response, name)).decode("utf-8-sig", "replace"), hidden)
        reached = name if target == url else f"{name} (redirected to {target})"
        if response.status != 200:
            raise status_error(response, reached, text)
        if target != url and response.content_type == "text/html":
            raise SearchError(f"{reached}: found a page of HTML; expected the address of a search", "response")
        return text
    raise SearchError(f"{name}: more than {MAX_REDIRECTS} redirects, the last one to {target}", "status")


def _redirected(response: aiohttp.ClientResponse, location: str, name: str, secret: bool) -> URL:
    """The URL to which a redirect leads; SearchError if the request cannot be sent there unchanged."""
    told = f"{name}: status {response.status}, a redirect to {redact(location)[:200]!r}"
    try:
        target = response.url.join(URL(location))
        elsewhere = target.origin() != response.url.origin()
    except ValueError:
        target = URL()
    if target.scheme not in ("http", "https"):
        raise SearchError(f"{told}, which is no http address", "status")
    remedy = "if it is right, set that address instead"
    if response.method == "POST" and response.status not in (307, 308):
        raise SearchError(f"{told}, which would lose the query; {remedy}", "status")
    if secret and elsewhere:
        raise SearchError(f"{told}, another server, which must not see the key; {remedy}", "status")
    return target


async def _read(response: aiohttp.ClientResponse, name: str) -> bytearray:
    """The body, decompressed."""
    data = bytearray()
    too_long = (response.content_length or 0) > MAX_ANSWER_BYTES
    async for chunk in response.content.iter_any():
        data += chunk
        if too_long or len(data) > MAX_ANSWER_BYTES:
            raise SearchError(f"{name}: the answer is longer than {MAX_ANSWER_BYTES} bytes", "response")
    return data


def _hide(text: str, secret: str | None) -> str:
    return text.replace(secret, "***") if secret else text


def status_error(response: aiohttp.ClientResponse, name: str, text: str) -> SearchError | QueryError:
    """The error for an answer whose status is not 200; it quotes the beginning of `text`."""
    status = response.status
    message = f"{name}: status {status}: {text[:200]!r}"
    if status in QUERY_STATUS:
        return QueryError(message, _reason(text))
    return SearchError(
        message,
        "rate_limit" if status == 429 else "status",
        retryable=status in RETRYABLE_STATUS,
        retry_after=_seconds(response.headers.get("Retry-After")),
    )


def _reason(text: str) -> str:
    """The reason in an error answer, taken from its JSON if that has a usual form, else the text."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    for key in ("detail", "message", "error") if isinstance(body, dict) else ():
        if isinstance(body.get(key), str):
            return str(body[key])[:200]
    return text[:200]


def _seconds(retry_after: str | None) -> float | None:
    """The seconds to wait by a Retry-After header (seconds or a date); None if it is missing or unreadable."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


async def with_search_retries(attempt: Callable[[], Awaitable[T]], retries: int) -> T:
    """Call `attempt` until it succeeds; raises the last SearchError after `retries` retries, any other error at once.

    Waits grow exponentially and are drawn from the upper half of their range, or are as long as the server asks; none
    exceeds MAX_WAIT_SECONDS.
    """
    return await with_retries(
        attempt,
        is_transient=lambda error: isinstance(error, SearchError) and error.retryable,
        attempts=retries + 1,
        wait=_wait_seconds,
        before_sleep=_tell,
    )


_tell = RetryTeller(logger, "failed search, attempt", WARNING_SECONDS)
_exponential = tenacity.wait_exponential(multiplier=FIRST_WAIT_SECONDS, max=MAX_WAIT_SECONDS)


def _wait_seconds(state: tenacity.RetryCallState) -> float:
    error = failure(state)
    asked = error.retry_after if isinstance(error, SearchError) else None
    if asked is not None:
        return min(asked, MAX_WAIT_SECONDS)
    return _exponential(state) * random.uniform(0.5, 1.0)  # not all at once, and never almost none


def search_session() -> aiohttp.ClientSession:
    """A session for backends, without a limit on connections: the callers bound how many requests are under way."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),  # a search is on its own
    )


class Closing(Protocol):
    """What is opened by `async with` and knows whether it was closed: a session, a pool of processes."""

    @property
    def closed(self) -> bool: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, kind: Any, error: Any, traceback: Any, /) -> None: ...


ClosingT = TypeVar("ClosingT", bound=Closing)
_shared: dict[tuple[asyncio.AbstractEventLoop, Callable[[], Any]], tuple[AsyncIterator[Any], Any]] = {}


async def shared_session() -> aiohttp.ClientSession:
    """The session for backends, one for each event loop."""
    return await shared(search_session)


async def shared(make: Callable[[], ClosingT]) -> ClosingT:
    """What `make` makes once for each event loop; closed when the loop shuts down its async generators."""
    key = asyncio.get_running_loop(), make
    if key not in _shared or _shared[key][1].closed:
        for ended in [other for other in _shared if other[0].is_closed()]:
            del _shared[ended]
        holder = _hold(make)
        _shared[key] = holder, await anext(holder)
    made: ClosingT = _shared[key][1]
    return made


async def _hold(make: Callable[[], ClosingT]) -> AsyncIterator[ClosingT]:
    async with make() as made:
        yield made
