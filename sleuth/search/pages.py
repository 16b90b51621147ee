"""Fetches web pages within limits: those behind search results, reduced to the text around their snippets, and those
that a model asks for, what matters to its question first.

Links come from strangers. So only http and https are followed, and only to public addresses; each redirect is checked,
and the address again at the moment of connecting, because a name may change in between. Size and time are limited. For
a page that cannot be fetched or is not HTML the result is None, and the caller keeps the snippet.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from sleuth.pages.pool import Page, PageReaders
from sleuth.search.http import MAX_REDIRECTS, REDIRECT_STATUS, shared

logger = logging.getLogger(__name__)

MAX_PAGE_BYTES = 1024 * 1024
CONCURRENT_PAGES = 8
RESOLVER_THREADS = 16
"""Of their own: names that are not answered must not keep hooks waiting for the threads of the event loop."""
CONNECTIONS_PER_HOST = 16
PAGE_SECONDS = 5.0
VISIT_SECONDS = 10.0
CONCURRENT_VISITS = 64
HTML_TYPES = ("text/html", "application/xhtml+xml")
HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; Sleuth/0.1)",
    "Accept": "text/html,application/xhtml+xml;q=0.9",
    "Accept-Language": "en,*;q=0.5",
}


async def page_contexts(links: Sequence[str], snippets: Sequence[str], *, proxy: str | None = None) -> list[str | None]:
    """For each link the text around its snippet; None if the page cannot be fetched or does not hold the snippet.

    Up to eight pages are fetched at once, each within PAGE_SECONDS, reading included.
    """
    places = asyncio.Semaphore(CONCURRENT_PAGES)
    session = await shared(_proxied_session if proxy else _direct_session)
    readers = await shared(PageReaders)
    await readers.ready()

    async def context(link: str, snippet: str) -> str | None:
        async with places:
            try:
                async with asyncio.timeout(PAGE_SECONDS):
                    page = await fetch_page(session, link, proxy)
                    return None if page is None else await readers.context(page, snippet)
            except Exception as error:  # whatever a page of a stranger does to the parsers, its snippet still stands
                logger.debug("page %s: %s: %s", link, type(error).__name__, error)
                return None

    return await asyncio.gather(*map(context, links, snippets))


class PageError(Exception):
    """A page cannot be read; the message says why, for the model to read."""


async def read_page(link: str, question: str, *, proxy: str | None = None, seconds: float = VISIT_SECONDS) -> str:
    """The text of the page at a link, what matters to the question first; PageError if there is none within `seconds`.

    At most CONCURRENT_VISITS pages are read at once in an event loop; the time does not count while it waits for them.
    """
    loop = asyncio.get_running_loop()
    places = _visits.setdefault(loop, asyncio.Semaphore(CONCURRENT_VISITS))
    session = await shared(_proxied_session if proxy else _direct_session)
    readers = await shared(PageReaders)
    await readers.ready()
    async with places:
        try:
            async with asyncio.timeout(seconds):
                page = await fetch_page(session, link, proxy)
                text = None if page is None else await readers.relevant(page, question)
        except TimeoutError:
            raise PageError(f"the page did not answer within {seconds:g} s") from None
        except Exception as error:  # whatever a page of a stranger does to the parsers
            logger.debug("page %s: %s: %s", link, type(error).__name__, error)
            raise PageError("the page cannot be reached; is it a public http or https address?") from None
    if text is None:
        raise PageError("there is no page with text at that address")
    return text


def _direct_session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=CONNECTIONS_PER_HOST, resolver=PublicResolver())
    return aiohttp.ClientSession(connector=connector, headers=HEADERS, cookie_jar=aiohttp.DummyCookieJar())


def _proxied_session() -> aiohttp.ClientSession:
    """A session without PublicResolver, which would refuse a proxy in the local network."""
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=CONNECTIONS_PER_HOST)
    return aiohttp.ClientSession(connector=connector, headers=HEADERS, cookie_jar=aiohttp.DummyCookieJar())


_visits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


# --- Fetching ---


async def fetch_page(session: aiohttp.ClientSession, link: str, proxy: str | None = None) -> Page | None:
    """The page at a link, or None if it is not HTML. Raises ValueError for an address that is not public."""
    url = URL(link)
    for _ in range(MAX_REDIRECTS + 1):
        await check_public(url, proxy)
        async with session.get(url, allow_redirects=False, proxy=proxy) as response:
            location = response.headers.get("Location")
            if response.status in REDIRECT_STATUS and location:
                url = url.join(URL(location))
                continue
            if response.status != 200 or response.content_type not in HTML_TYPES:
                return None
            data = await _read(response)
            return Page(data, response.charset, cut=len(data) == MAX_PAGE_BYTES)
    raise ValueError(f"more than {MAX_REDIRECTS} redirects")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body, decompressed, up to the limit; the rest is not read."""
    data = bytearray()
    async for chunk in response.content.iter_chunked(64 * 1024):
        data += chunk
        if len(data) >= MAX_PAGE_BYTES:
            break
    return bytes(data[:MAX_PAGE_BYTES])


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet; an IPv4 address inside an IPv6 one is checked, too."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        wrapped = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None) or _nat64(ip)
        if wrapped is not None:
            return is_public(str(wrapped))
    return ip.is_global and not ip.is_multicast


def _nat64(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if ip in ipaddress.ip_network("64:ff9b::/96"):
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return None


async def check_public(url: URL, proxy: str | None = None) -> None:
    """Raise ValueError unless the URL is http(s) and its host is public, as far as that is known before connecting.

    Without a proxy, names are checked when they are resolved to connect (`PublicResolver`). A proxy resolves names
    itself; then a name of the local network is refused if this machine can resolve it.
    """
    host = url.host
    if url.scheme not in ("http", "https") or not host:
        raise ValueError(f"{url}: expected an http or https link with a host")
    try:
        addresses = [str(ipaddress.ip_address(host.partition("%")[0]))]
    except ValueError:
        addresses = await _addresses(host) if proxy else []
        if proxy and "." not in host.rstrip("."):
            raise ValueError(f"{url}: not a public host") from None
    if not all(map(is_public, addresses)):
        raise ValueError(f"{url}: not a public address")


async def _addresses(host: str) -> list[str]:
    try:
        found = await _Names().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(info[4][0]) for info in found]


_resolver_threads = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="page-names")


class _Names:
    """Resolves names as an event loop does, in threads of our own."""

    async def getaddrinfo(self, *words: Any, **options: Any) -> Any:
        look_up = partial(socket.getaddrinfo, *words, **options)
        return await asyncio.get_running_loop().run_in_executor(_resolver_threads, look_up)

    async def getnameinfo(self, *words: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(_resolver_threads, socket.getnameinfo, *words)


class PublicResolver(AbstractResolver):
    """Resolves names, and refuses a name that has an address which is not public."""

    def __init__(self) -> None:
        self._resolver = ThreadedResolver(cast(asyncio.AbstractEventLoop, _Names()))

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        if not all(is_public(result["host"]) for result in found):
            raise OSError(f"{host}: not a public address")
        return found

    async def close(self) -> None:
        await self._resolver.close()
