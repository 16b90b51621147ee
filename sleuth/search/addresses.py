"""Checks the URLs of searches and proxies before anything is sent to them."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

SEARCH_EXAMPLE = "http://127.0.0.1:8000/retrieve"
PROXY_EXAMPLE = "http://proxy.example.org:3128"


def check_search_url(url: str) -> str:
    """The URL, if it is the address of a search; ValueError says what it lacks. `http://host/?` is a server's root."""
    parts = _http_parts(url, SEARCH_EXAMPLE)
    if parts.path in ("", "/") and "?" not in url:
        port = f":{parts.port}" if parts.port else ""
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        raise ValueError(f"has no path; add the path, as in {parts.scheme}://{host}{port}/retrieve")
    return url


def check_proxy_url(url: str) -> str:
    """The URL, if it can be a proxy's; ValueError says what it lacks, without the password it may hold."""
    _http_parts(url, PROXY_EXAMPLE)
    return url


def _http_parts(url: str, example: str) -> SplitResult:
    """The parts of a URL of http or https with a host; ValueError names what is wrong and a right one."""
    if re.search(r"[\s\x00-\x1f\x7f]", url):
        raise ValueError(f"holds whitespace or control characters; expected a URL such as {example}")
    scheme, separator, _ = url.partition("://")
    if not separator or "/" in scheme:
        raise ValueError(f"has no scheme; put http:// in front, as in {example}")
    if scheme.lower() not in ("http", "https"):
        raise ValueError(f"is a URL of {scheme[:20]!r}; expected http or https, as in {example}")
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
        host.encode("idna")  # as it is when the name is looked up
    except ValueError:  # its text may hold a password
        raise ValueError(f"has a host or a port that cannot be one; expected a URL such as {example}") from None
    if port == 0:
        raise ValueError(f"names port 0, at which nobody answers; expected a URL such as {example}")
    if host in ("http", "https") and parts.path.startswith("//"):
        raise ValueError(f"holds {host}:// twice; expected a URL such as {example}")
    if not re.fullmatch(r"[\w.:%-]+", host):
        raise ValueError(f"has {'the host ' + repr(host) if host else 'no host'}; expected a URL such as {example}")
    return parts
