"""Fetches the web pages behind search results, within limits, and reduces them to the text around the snippets.

Links come from strangers. So only http and https are followed, and only to public addresses; each redirect is checked,
and the address again at the moment of connecting, because a name may change in between. Size and time are limited. For
a page that cannot be fetched or is not HTML the result is None, and the caller keeps the snippet.
"""

from __future__ import annotations

import asyncio
import codecs
import ipaddress
import logging
import re
import socket
from collections.abc import Sequence

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from sleuth.search.http import MAX_REDIRECTS, REDIRECT_STATUS, shared_session

logger = logging.getLogger(__name__)

MAX_PAGE_BYTES = 2 * 1024 * 1024
CONCURRENT_PAGES = 8
CONNECTIONS_PER_HOST = 16
PAGE_SECONDS = 5.0
CONTEXT_CHARS = 600
"""Around a snippet, at most this many characters on either side, within its paragraph."""
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
    session = await shared_session(_proxied_session if proxy else _direct_session)

    async def context(link: str, snippet: str) -> str | None:
        async with places:
            try:
                async with asyncio.timeout(PAGE_SECONDS):
                    page = await fetch_page(session, link, proxy)
                    return page and await asyncio.to_thread(snippet_context, page, snippet)
            except Exception as error:  # whatever a page of a stranger does to the parsers, its snippet still stands
                logger.debug("page %s: %s: %s", link, type(error).__name__, error)
                return None

    return await asyncio.gather(*map(context, links, snippets))


def _direct_session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=CONNECTIONS_PER_HOST, resolver=PublicResolver())
    return aiohttp.ClientSession(connector=connector, headers=HEADERS, cookie_jar=aiohttp.DummyCookieJar())


def _proxied_session() -> aiohttp.ClientSession:
    """A session without PublicResolver, which would refuse a proxy in the local network."""
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=CONNECTIONS_PER_HOST)
    return aiohttp.ClientSession(connector=connector, headers=HEADERS, cookie_jar=aiohttp.DummyCookieJar())


# --- Fetching ---


async def fetch_page(session: aiohttp.ClientSession, link: str, proxy: str | None = None) -> str | None:
    """The HTML at a link, or None if it is not HTML. Raises ValueError for an address that is not public."""
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
            return decode_page(data, response.charset, cut=len(data) == MAX_PAGE_BYTES)
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
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(info[4][0]) for info in found]


class PublicResolver(AbstractResolver):
    """Resolves names, and refuses a name that has an address which is not public."""

    def __init__(self) -> None:
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        if not all(is_public(result["host"]) for result in found):
            raise OSError(f"{host}: not a public address")
        return found

    async def close(self) -> None:
        await self._resolver.close()


# --- Decoding ---

_META_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([A-Za-z0-9_:.-]{2,40})""", re.IGNORECASE)
_BETWEEN_TEXTS = re.compile(rb"[<>\r\n]+")
_WIDER = {  # what pages mean by a label: its superset, as browsers read it
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "iso8859-9": "cp1254",
    "big5": "big5hkscs",
}
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def decode_page(data: bytes, header_charset: str | None = None, *, cut: bool = False) -> str:
    """The text of a page. Tried in this order: byte order mark, UTF-8, the declared charset, a detected one.

    `cut`: the page is longer than the data, which may therefore end inside a character.
    """
    for bom, encoding in _BOMS:
        if data.startswith(bom):
            return data[len(bom) :].decode(encoding, "replace")
    meta = _META_CHARSET.search(data, 0, 4096)
    declared = [_codec(label) for label in (header_charset, meta[1].decode("ascii") if meta else None) if label]
    utf8 = [] if b"\0" in data or "iso2022_jp" in declared else ["utf-8"]
    for encoding in filter(None, [*utf8, *declared]):
        try:
            return codecs.getincrementaldecoder(encoding)().decode(data, final=not cut)
        except UnicodeDecodeError:
            continue
    return data.decode(_detected(data), "replace")


def _codec(label: str) -> str | None:
    """Python's codec for a declared charset; None if it is unknown or does not decode text."""
    try:
        info = codecs.lookup(label)
    except (LookupError, ValueError):
        return None
    name = _WIDER.get(info.name, info.name)
    return name if info._is_text_encoding and not name.startswith(("idna", "punycode", "unicode", "raw")) else None


def _detected(data: bytes) -> str:
    """The charset that chardet detects, among those of the web, from those parts of the page that are not ASCII.

    The whole page would mislead it: much markup and English outweighs a few lines of another language.
    """
    import chardet

    texts = b" ".join(text for text in _BETWEEN_TEXTS.split(data) if not text.isascii())
    best = chardet.detect(texts, encoding_era=chardet.EncodingEra.MODERN_WEB, prefer_superset=True, compat_names=False)
    return best["encoding"] or "cp1252"


# --- Reading ---


def snippet_context(html: str, snippet: str) -> str | None:
    """The main text of a page around its snippet, or None if the snippet is not found in it."""
    text = main_text(html)
    squeezed, positions = _squeeze(text)
    spans = [span for span in (_find(squeezed, positions, part) for part in _fragments(snippet)) if span]
    return "\n".join(text[start:end] for start, end in _merged([_widen(text, *span) for span in spans])) or None


def main_text(html: str) -> str:
    """The main text of a page, each paragraph on a line; "" if it has none."""
    from trafilatura import extract

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # a page without text is no error here
    return extract(html, include_comments=False, include_tables=True, favor_recall=True, deduplicate=False) or ""


def _fragments(snippet: str) -> list[str]:
    """The parts of a snippet between ellipses, without a date in front; short parts only if there are no others."""
    parts = [part.strip(" \t\n·—–-") for part in re.split(r"\.{3,}|…|(?<=\d{4}) [—·-] ", snippet)]
    longest = max((len(part) for part in parts), default=0)
    return [part for part in parts if len(part) >= min(longest, 15)]


def _find(squeezed: str, positions: Sequence[int], part: str) -> tuple[int, int] | None:
    """The span in the text where a part of a snippet occurs, ignoring whitespace and case."""
    wanted, _ = _squeeze(part)
    start = squeezed.find(wanted) if wanted else -1
    return None if start < 0 else (positions[start], positions[start + len(wanted) - 1] + 1)


def _squeeze(text: str) -> tuple[str, list[int]]:
    """The text in lower case without whitespace, and the position of each of its characters in the original."""
    positions = [index for index, character in enumerate(text) if not character.isspace()]
    return "".join(_lower(text[index]) for index in positions), positions


def _lower(character: str) -> str:
    lower = character.lower()
    return lower if len(lower) == 1 else character


def _widen(text: str, start: int, end: int) -> tuple[int, int]:
    """The span widened to whole paragraphs; on each side by at most CONTEXT_CHARS, then cut at a word."""
    low, high = max(0, start - CONTEXT_CHARS), min(len(text), end + CONTEXT_CHARS)
    line_start, line_end = text.rfind("\n", low, start) + 1, text.find("\n", end, high)
    if line_start == 0 and low > 0:
        line_start = text.find(" ", low, start) + 1 or low
    if line_end < 0:
        line_end = high if high == len(text) else max(text.rfind(" ", end, high), end)
    return line_start, line_end


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged
