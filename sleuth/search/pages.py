"""Web pages behind search results: fetched with limits, decoded, and reduced to what stands around the snippets.

A link comes from a stranger. So only http and https are followed, only to public addresses (checked for every
redirect, and at the moment of connecting, so that a name cannot change in between), a few megabytes and
seconds at most. A page that cannot be had or is not HTML is None: its snippet still stands.
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

from sleuth.search.http import shared_session

logger = logging.getLogger(__name__)

MAX_PAGE_BYTES = 2 * 1024 * 1024
MAX_REDIRECTS = 5
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
    """For each link the text around its snippet; None where the page or the snippet in it cannot be had.

    Eight pages at once, PAGE_SECONDS for each, reading included.
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
    """Without the resolver: it would refuse a proxy in the local network."""
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=CONNECTIONS_PER_HOST)
    return aiohttp.ClientSession(connector=connector, headers=HEADERS, cookie_jar=aiohttp.DummyCookieJar())


# --- Fetching ---


async def fetch_page(session: aiohttp.ClientSession, link: str, proxy: str | None = None) -> str | None:
    """The HTML at a link, or None if it is something else. Raises ValueError for an address that is not public."""
    url = URL(link)
    for _ in range(MAX_REDIRECTS + 1):
        await check_public(url, proxy)
        async with session.get(url, allow_redirects=False, proxy=proxy) as response:
            location = response.headers.get("Location")
            if response.status in (301, 302, 303, 307, 308) and location:
                url = url.join(URL(location))
                continue
            if response.status != 200 or response.content_type not in HTML_TYPES:
                return None
            data = await _read(response)
            return decode_page(data, response.charset, cut=len(data) == MAX_PAGE_BYTES)
    raise ValueError(f"more than {MAX_REDIRECTS} redirects")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body, decompressed, up to the limit; what is beyond is not read."""
    data = bytearray()
    async for chunk in response.content.iter_chunked(64 * 1024):
        data += chunk
        if len(data) >= MAX_PAGE_BYTES:
            break
    return bytes(data[:MAX_PAGE_BYTES])


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, also where IPv6 wraps an IPv4 address."""
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
    """ValueError unless the URL is http(s) and, as far as can be told before connecting, of a public host.

    Without a proxy names are checked when they are resolved to connect (`PublicResolver`). With one, the proxy
    resolves them; a name of the local network is refused where this machine can tell.
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
    """Resolves names, and refuses those with an address that is not public."""

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
    """The text of a page by its byte order mark, as UTF-8 if it is that, as declared, or as detected.

    `cut`: the page goes on beyond the data, which may then end within a character.
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
    """Python's codec for a declared charset; None if it is unknown or no charset of text."""
    try:
        info = codecs.lookup(label)
    except (LookupError, ValueError):
        return None
    name = _WIDER.get(info.name, info.name)
    return name if info._is_text_encoding and not name.startswith(("idna", "punycode", "unicode", "raw")) else None


def _detected(data: bytes) -> str:
    """The charset by chardet, among those of the web, from the texts that are not ASCII.

    The whole page would mislead it: markup and English in ASCII outweigh some lines of another language.
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
    """A page's main text, a paragraph a line; "" if it has none."""
    from trafilatura import extract

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # a page without text is no error here
    return extract(html, include_comments=False, include_tables=True, favor_recall=True, deduplicate=False) or ""


def _fragments(snippet: str) -> list[str]:
    """The parts of a snippet between its ellipses, without the date in front, short ones only if there is no other."""
    parts = [part.strip(" \t\n·—–-") for part in re.split(r"\.{3,}|…|(?<=\d{4}) [—·-] ", snippet)]
    longest = max((len(part) for part in parts), default=0)
    return [part for part in parts if len(part) >= min(longest, 15)]


def _find(squeezed: str, positions: Sequence[int], part: str) -> tuple[int, int] | None:
    """Where a part of a snippet stands in the text, whatever the whitespace and case."""
    wanted, _ = _squeeze(part)
    start = squeezed.find(wanted) if wanted else -1
    return None if start < 0 else (positions[start], positions[start + len(wanted) - 1] + 1)


def _squeeze(text: str) -> tuple[str, list[int]]:
    """The text without whitespace, in lower case, and where each of its characters stood."""
    positions = [index for index, character in enumerate(text) if not character.isspace()]
    return "".join(_lower(text[index]) for index in positions), positions


def _lower(character: str) -> str:
    lower = character.lower()
    return lower if len(lower) == 1 else character


def _widen(text: str, start: int, end: int) -> tuple[int, int]:
    """The span widened to its paragraphs, but by CONTEXT_CHARS at most, and then at a word."""
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
