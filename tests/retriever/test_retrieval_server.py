"""The retrieval server, as a process of its own, over a small corpus."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from local_dense_retriever.corpus import read_corpus
from local_dense_retriever.retrieval_server import bind

ROOT = Path(__file__).resolve().parents[2]
PASSAGES = [
    {"id": "0", "contents": '"France"\nThe capital of France is Paris.'},
    {"id": "1", "contents": '"Spain"\nThe capital of Spain is Madrid.'},
    {"id": "2", "contents": '"Hamlet"\nA tragedy by William Shakespeare.'},
    {"id": "3", "title": "Bern", "text": "Bern is the federal city of Switzerland."},
]


def start_server(folder: Path, *flags: str, passages: Sequence[dict] = PASSAGES) -> tuple[subprocess.Popen[str], Path]:
    corpus, url_file = folder / "corpus.jsonl.gz", folder / "url"
    with gzip.open(corpus, "wt") as file:
        file.writelines(json.dumps(passage) + "\n" for passage in passages)
    command = [sys.executable, "local_dense_retriever/retrieval_server.py", "--corpus_path", str(corpus)]
    command += ["--url_file", str(url_file), *flags]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True), url_file


@contextmanager
def running(folder: Path, *flags: str, passages: Sequence[dict] = PASSAGES) -> Iterator[str]:
    """The URL of a server over the passages, which must end well when it is told to."""
    process, url_file = start_server(folder, "--port", "0", *flags, passages=passages)
    deadline = time.monotonic() + 30
    while not url_file.exists():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield url_file.read_text().strip()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture(scope="module")
def retrieve(url: str) -> Callable[..., requests.Response]:
    return lambda **body: requests.post(f"{url}/retrieve", json=body, timeout=10)


def test_is_healthy_when_it_answers(url: str) -> None:
    assert requests.get(f"{url}/health", timeout=10).status_code == 200


@pytest.mark.parametrize("queries", [[], ["capital of France"], ["capitals of France", "who wrote Hamlet", "Madrid"]])
def test_one_list_a_query(retrieve: Callable[..., requests.Response], queries: list[str]) -> None:
    result = retrieve(queries=queries, topk=1).json()["result"]
    assert [[document["id"] for document in documents] for documents in result] == [["0"], ["2"], ["1"]][: len(queries)]


def test_both_shapes_agree(retrieve: Callable[..., requests.Response]) -> None:
    flat = retrieve(queries=["capital"], topk=3).json()["result"][0]
    scored = retrieve(queries=["capital"], topk=3, return_scores=True).json()["result"][0]
    assert [hit["document"] for hit in scored] == flat
    scores = [hit["score"] for hit in scored]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] > 0


def test_fewer_matches_are_fewer_passages(retrieve: Callable[..., requests.Response]) -> None:
    assert len(retrieve(queries=["federal city"], topk=50).json()["result"][0]) == 1
    assert retrieve(queries=["xyzzy"]).json()["result"] == [[]]


def test_title_and_text_get_contents(retrieve: Callable[..., requests.Response]) -> None:
    (document,) = retrieve(queries=["federal city"]).json()["result"][0]
    assert document["contents"] == '"Bern"\nBern is the federal city of Switzerland.'


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"queries": ["a"], "topk": 0}, 422),
        ({"queries": ["a"], "topk": 101}, 422),
        ({"queries": ["a"], "topk": "3"}, 422),
        ({"queries": ["a"], "top_k": 3}, 422),
        ({"queries": [" \n"]}, 422),
        ({"queries": "a"}, 422),
        ({"queries": [7]}, 422),
        ({"queries": ["a"] * 1025}, 422),
        ({"queries": ["a" * 1_000_000]}, 422),
        ({}, 422),
    ],
)
def test_bad_requests_get_a_reason(retrieve: Callable[..., requests.Response], body: dict, status: int) -> None:
    response = retrieve(**body)
    assert response.status_code == status
    assert response.json()["detail"]


def test_bad_json_is_refused(url: str) -> None:
    response = requests.post(f"{url}/retrieve", data="{", headers={"Content-Type": "application/json"}, timeout=10)
    assert response.status_code == 422


MIXED = {
    "zh": "北京是中华人民共和国的首都，人口两千多万。",
    "ja": "東京タワーは日本の首都にある電波塔です。",
    "th": "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย",
    "ko": "서울은 대한민국의 수도이다.",
    "en": "The iPhone手机 is sold by Apple in many cities.",
    "hi": "नई दिल्ली भारत की राजधानी है।",
}


@pytest.mark.parametrize("language", ["english", "chinese"])
def test_every_script_is_found_in_a_mixed_corpus(tmp_path: Path, language: str) -> None:
    passages = [{"id": name, "contents": text} for name, text in MIXED.items()]
    queries = {
        "中国的首都": "zh",
        "首都北京": "zh",
        "日本の首都はどこ": "ja",
        "เมืองหลวงของไทย": "th",
        "대한민국 수도": "ko",
        "iphones": "en" if language == "english" else None,  # stems are English
        "苹果手机": "en",
        "भारत की राजधानी": "hi",
        "塔": "ja",
        "xyzzy": None,
    }
    with running(tmp_path, "--language", language, passages=passages) as url:
        body = {"queries": list(queries), "topk": 1}
        result = requests.post(f"{url}/retrieve", json=body, timeout=10).json()["result"]
    found = [documents[0]["id"] if documents else None for documents in result]
    assert dict(zip(queries, found, strict=True)) == queries


def test_port_in_use_is_a_clear_error(url: str, tmp_path: Path) -> None:
    port = url.rsplit(":", 1)[1]
    process, _ = start_server(tmp_path, "--port", port)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in stderr
    assert "Traceback" not in stderr


def test_a_port_is_taken_from_the_start_not_only_once_all_is_loaded() -> None:
    with bind("127.0.0.1", 0) as first, pytest.raises(ValueError, match="choose another --port"):
        bind("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize(
    ("flag", "value", "expected"), [("--retriever_name", "e5", "bm25"), ("--topk", "0", "1 to 100")]
)
def test_bad_flags_name_the_choices(tmp_path: Path, flag: str, value: str, expected: str) -> None:
    process, _ = start_server(tmp_path, "--port", "0", flag, value)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 2
    assert expected in stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "no passage"), ("{", "line 1: expected JSON"), ('\n{"id": 1}', "line 2: expected an object with 'contents'")],
)
def test_a_bad_corpus_names_the_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_corpus(path)


def test_missing_corpus() -> None:
    with pytest.raises(ValueError, match="no corpus at"):
        read_corpus("nowhere.jsonl")
