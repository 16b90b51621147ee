"""The server over HTTP, around a retriever whose searches the tests control."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests

from local_dense_retriever.app import MAX_BODY_BYTES, MAX_QUERIES, MAX_QUERY_CHARS, MAX_TOPK
from local_dense_retriever.batching import BatchingConfig
from local_search_server import local_search
from sleuth.search import SearchError
from tests.retriever.scripted import ScriptedRetriever, fetch, serving


@pytest.fixture
def retriever() -> ScriptedRetriever:
    return ScriptedRetriever()


@pytest.fixture
def url(retriever: ScriptedRetriever) -> Iterator[str]:
    with serving(retriever) as url:
        try:
            yield url
        finally:
            retriever.gate.set()


def post(url: str, body: Any, **options: Any) -> requests.Response:
    return requests.post(f"{url}/retrieve", json=body, timeout=20, **options)


def in_thread(ask: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    return thread, answers


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def metric(url: str, line_start: str) -> float:
    for line in requests.get(f"{url}/metrics", timeout=10).text.splitlines():
        if line.startswith(line_start + " "):
            return float(line.split()[-1])
    return 0.0


def documents(topk: int) -> list[dict[str, Any]]:
    return [json.loads(fetch(index)) for index in range(topk)]


def test_both_shapes(url: str) -> None:
    flat = post(url, {"queries": ["abcd", "nothing"], "topk": 2})
    assert flat.headers["content-type"] == "application/json"
    assert flat.json() == {"result": [documents(2), []]}
    scored = post(url, {"queries": ["abcd"], "return_scores": True}).json()
    assert scored == {"result": [[{"document": d, "score": 4.0 - i} for i, d in enumerate(documents(3))]]}


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b'{"queries": ["a"], "topk": 0}', 422, "topk: "),
        (b'{"queries": ["a"], "topk": 101}', 422, "less than or equal to 100, found 101"),
        (b'{"queries": ["a"], "topk": true}', 422, "topk: "),
        (b'{"queries": ["a"], "topk": 1e400}', 422, "topk: "),
        (b'{"queries": ["a", " \\n\\t"]}', 422, "queries[1]: "),
        (b'{"queries": [""]}', 422, "is blank"),
        (b'{"queries": "a"}', 422, "queries: "),
        (b'{"queries": [["a"]]}', 422, "queries[0]: "),
        (b'{"queries": [null]}', 422, "queries[0]: "),
        (b'{"queries": ["\\ud800"]}', 422, "Invalid JSON"),
        (b'{"queries": ["a"], "return_scores": "yes"}', 422, "return_scores: "),
        (b'{"queries": ["a"], "k": 1}', 422, "k: "),
        (b'{"queries": [' + b'"a",' * 1024 + b'"a"]}', 422, "at most 1024"),
        (b"[]", 422, "body: "),
        (b"{", 422, "Invalid JSON"),
        (b"", 422, "Invalid JSON"),
        (b'{"queries": ["\xff"]}', 422, "Invalid JSON"),
        (b"[" * 100_000, 422, "Invalid JSON"),
        (
            json.dumps({"queries": ["a" * 1_000_000]}).encode(),
            422,
            "queries[0]: String should have at most 8192 characters, found 1000000",
        ),
        (json.dumps({"queries": ["a", "é" * 8193]}).encode(), 422, "queries[1]: String should have at most 8192 char"),
        (b" " * (MAX_BODY_BYTES + 1), 413, f"longer than {MAX_BODY_BYTES} bytes"),
    ],
)
def test_bad_requests_get_a_reason(
    url: str, retriever: ScriptedRetriever, body: bytes, status: int, reason: str
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = requests.post(f"{url}/retrieve", data=body, headers=headers, timeout=20)
    assert answer.status_code == status
    assert reason in answer.json()["detail"]
    assert len(answer.content) < 1000
    assert not retriever.asked


def test_a_query_of_the_greatest_length_is_searched_and_the_bounds_are_documented(
    url: str, retriever: ScriptedRetriever
) -> None:
    assert post(url, {"queries": ["é" * MAX_QUERY_CHARS], "topk": 1}).json() == {"result": [documents(1)]}
    documented = (Path(__file__).resolve().parents[2] / "docs/retrieval.md").read_text("utf-8")
    for bound in (MAX_QUERY_CHARS, MAX_QUERIES, MAX_TOPK):
        assert f"{bound:,}" in documented.partition("## What a request may hold")[2].partition("## ")[0]


def test_a_body_that_is_not_said_to_be_json_is_refused(url: str) -> None:
    answer = requests.post(f"{url}/retrieve", data={"queries": "a"}, timeout=20)
    assert answer.status_code == 415
    assert "expected Content-Type: application/json" in answer.json()["detail"]
    assert requests.post(f"{url}/retrieve", data=b'{"queries": []}', timeout=20).json() == {"result": []}
    assert requests.get(f"{url}/retrieve", timeout=20).status_code == 405
    assert requests.get(f"{url}/nothing", timeout=20).json() == {"detail": "Not Found"}


def test_metrics_count_and_time(url: str) -> None:
    for queries in (["a"], ["b", "a"], []):
        post(url, {"queries": queries})
    post(url, {"queries": [""]})
    assert metric(url, 'retrieval_requests_total{path="/retrieve",status="200"}') == 3
    assert metric(url, 'retrieval_requests_total{path="/retrieve",status="422"}') == 1
    assert metric(url, "retrieval_cache_hits_total") == 1
    assert metric(url, "retrieval_cache_misses_total") == 2
    assert metric(url, 'retrieval_batch_size_bucket{le="1.0"}') == 2
    assert metric(url, "retrieval_queue_length") == 0
    for name in ("queue", "encode", "search", "fetch"):
        assert metric(url, f"retrieval_{name}_seconds_count") == 2


def test_500_clients_at_once(url: str, retriever: ScriptedRetriever) -> None:
    async def clients() -> list[Any]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def ask(number: int) -> Any:
                body = {"queries": ["x" * number], "topk": 1, "return_scores": True}
                async with session.post(f"{url}/retrieve", json=body) as answer:
                    return await answer.json()

            return await asyncio.gather(*map(ask, range(1, 501)))

    answers = asyncio.run(clients())
    assert [answer["result"][0][0]["score"] for answer in answers] == [float(number) for number in range(1, 501)]
    assert sorted(map(len, retriever.asked)) == list(range(1, 501))
    assert len(retriever.batches) < 250


def test_a_client_that_goes_away_takes_its_query_along(url: str, retriever: ScriptedRetriever) -> None:
    retriever.gate.clear()
    running, _ = in_thread(lambda: post(url, {"queries": ["running"]}))
    retriever.entered.acquire()
    body = b'{"queries": ["gone"]}'
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as client:
        client.sendall(b"POST /retrieve HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        wait_until(lambda: metric(url, "retrieval_queue_length") == 1)
    wait_until(lambda: metric(url, "retrieval_queue_length") == 0)
    retriever.gate.set()
    running.join()
    assert post(url, {"queries": ["after"]}).status_code == 200
    assert retriever.asked == ["running", "after"]
    assert metric(url, "retrieval_abandoned_total") == 1


def test_a_client_that_goes_away_while_it_sends(url: str, retriever: ScriptedRetriever) -> None:
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as client:
        client.sendall(b'POST /retrieve HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"queries": ')
        time.sleep(0.1)
    wait_until(lambda: metric(url, 'retrieval_requests_total{path="/retrieve",status="499"}') == 1)
    assert not retriever.asked


def test_a_failed_search_is_a_500_and_the_server_lives_on(url: str) -> None:
    answer = post(url, {"queries": ["boom"]})
    assert (answer.status_code, answer.json()) == (500, {"detail": "the search failed: RuntimeError: out of memory"})
    assert post(url, {"queries": ["a"]}).status_code == 200


def test_a_full_queue_is_a_503_that_says_when_to_come_back(retriever: ScriptedRetriever) -> None:
    with serving(retriever, config=BatchingConfig(max_queue=1)) as url:
        retriever.gate.clear()
        running, _ = in_thread(lambda: post(url, {"queries": ["running"]}))
        retriever.entered.acquire()
        waiting, answers = in_thread(lambda: post(url, {"queries": ["waiting"]}))
        wait_until(lambda: metric(url, "retrieval_queue_length") == 1)
        refused = post(url, {"queries": ["refused"]})
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert "at most 1 may" in refused.json()["detail"]
        with pytest.raises(SearchError) as error:
            asyncio.run(local_search(f"{url}/retrieve", "refused", retries=0))
        assert (error.value.retryable, error.value.retry_after) == (True, 1.0)
        too_many = post(url, {"queries": ["a", "b"]})
        assert too_many.status_code == 413  # would never fit
        retriever.gate.set()
        running.join()
        waiting.join()
        assert answers[0].status_code == 200
        assert post(url, {"queries": ["refused"]}).status_code == 200


def test_shutdown_finishes_what_was_accepted(retriever: ScriptedRetriever) -> None:
    retriever.gate.clear()
    with serving(retriever, config=BatchingConfig(max_batch_size=1)) as url:
        asking = [in_thread(lambda text=text: post(url, {"queries": [text]})) for text in "abc"]
        wait_until(lambda: metric(url, "retrieval_queue_length") == 2)
        threading.Timer(0.3, retriever.gate.set).start()
    for thread, answers in asking:
        thread.join()
        assert answers[0].json()["result"] == [documents(3)]
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{url}/health", timeout=5)
