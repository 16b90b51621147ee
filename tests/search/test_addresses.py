"""Which URLs may be those of a search or a proxy, and what is told of others."""

from __future__ import annotations

import pytest

from sleuth.search.addresses import check_proxy_url, check_search_url


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000/retrieve",
        "HTTPS://user:secret@search.example.org/v1/retrieve?index=a#b",
        "http://[::1]:8000/retrieve",
        "http://search_server:8000/retrieve",
        "http://中国.cn/检索",
        "http://search.example.org/?",
    ],
)
def test_addresses_of_a_search(url: str) -> None:
    assert check_search_url(url) == url


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://127.0.0.1:8000", "has no path; add the path, as in http://127.0.0.1:8000/retrieve$"),
        ("https://u:secret@[::1]:8000/", r"has no path; add the path, as in https://\[::1\]:8000/retrieve$"),
        ("127.0.0.1:8000/retrieve", "has no scheme; put http:// in front"),
        ("localhost:8000/retrieve", "has no scheme"),
        ("//localhost:8000/retrieve", "has no scheme"),
        ("/retrieve?next=http://localhost", "has no scheme"),
        ("http:/localhost/retrieve", "has no scheme"),
        ("", "has no scheme"),
        ("ftp://localhost/retrieve", "is a URL of 'ftp'; expected http or https"),
        ("http:///retrieve", "has no host"),
        ("http://:8000/retrieve", "has no host"),
        ("http://user:secret@/retrieve", "has no host"),
        ("http://http://localhost/retrieve", "holds http:// twice"),
        ("http://<host>:8000/retrieve", "has the host '<host>'"),
        ("http://local host/retrieve", "whitespace"),
        ("http://localhost/retrieve\n", "whitespace"),
        ("http://localhost\0/retrieve", "control characters"),
        ("http://localhost:0/retrieve", "port 0"),
        ("http://localhost:65536/retrieve", "a port that cannot be one"),
        ("http://user:secret/retrieve", "a port that cannot be one"),
        ("http://[/retrieve", "cannot be one"),
        ("http://search..org/retrieve", "cannot be one"),
        ("http://" + "a" * 64 + "/retrieve", "cannot be one"),
    ],
)
def test_what_is_no_address_of_a_search(url: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        check_search_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://proxy:3128", "http://user:secret@10.0.0.1:3128/"])
def test_addresses_of_a_proxy(url: str) -> None:
    assert check_proxy_url(url) == url


@pytest.mark.parametrize("url", ["proxy:3128", "socks5://user:secret@proxy:1080", "http://user:secret@:3128"])
def test_what_is_no_address_of_a_proxy(url: str) -> None:
    with pytest.raises(ValueError, match=r"as in|such as") as caught:
        check_proxy_url(url)
    assert "secret" not in str(caught.value)
