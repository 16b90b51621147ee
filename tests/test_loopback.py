"""A run's own traffic and the proxies of the environment."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import requests

from sleuth.loopback import direct_session, without_proxy

NOWHERE = "http://127.0.0.1:9"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


@pytest.fixture
def url() -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_direct_session_uses_no_proxy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.setenv(name, NOWHERE)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(requests.exceptions.ProxyError):
        requests.get(url, timeout=5)
    with direct_session() as session:
        assert session.get(url, timeout=5).status_code == 200
    for name, value in without_proxy(os.environ).items():
        monkeypatch.setenv(name, value)
    assert requests.get(url, timeout=5).status_code == 200


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "127.0.0.1,localhost,::1,10.0.0.7"),
        ({"no_proxy": "a.com, b.com", "NO_PROXY": "b.com,c.com"}, "a.com,b.com,c.com,127.0.0.1,localhost,::1,10.0.0.7"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_what_the_user_excepts_stays(environment: dict[str, str], expected: str) -> None:
    assert without_proxy(environment, "10.0.0.7") == {"no_proxy": expected, "NO_PROXY": expected}


def test_grpc_s_own_variable_is_followed_where_it_is_set() -> None:
    assert without_proxy({"no_grpc_proxy": "a"})["no_grpc_proxy"] == "a,127.0.0.1,localhost,::1"
