"""Downloads by huggingface_hub from a local hub that does what servers do: breaks off, lies, knows no ranges."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import tenacity
from huggingface_hub import constants, file_download

from local_dense_retriever import download, sizes
from local_dense_retriever import hub as hub_module

ROOT = Path(__file__).resolve().parents[2]
TEXT = b"".join(b'{"id": "%d", "contents": "passage %d"}\n' % (i, i) for i in range(20_000))
PACKED = gzip.compress(TEXT)
FILES = {
    "PeterJinGo/wiki-18-e5-index/part_aa": os.urandom(3_000_000),
    "PeterJinGo/wiki-18-e5-index/part_ab": os.urandom(1_000_000),
    "PeterJinGo/wiki-18-corpus/wiki-18.jsonl.gz": PACKED,
}
INDEX = FILES["PeterJinGo/wiki-18-e5-index/part_aa"] + FILES["PeterJinGo/wiki-18-e5-index/part_ab"]


class Hub(ThreadingHTTPServer):
    """A hub whose faults a test chooses; files lie behind a redirect to another host, as on the real one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = dict(FILES)
        self.break_after: int | None = None
        self.ranges = True
        self.states_hash = True
        self.stated_hash: str | None = None
        self.failures = 0
        self.bytes_per_s: float | None = None
        self.head: dict[str, str] | None = None  # what HEAD answers instead
        self.token: str | None = None  # which the hub asks for, and the storage must not see
        self.gets: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def storage(self) -> str:
        return f"http://localhost:{self.server_port}/storage"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None: ...

    def _find(self) -> tuple[str, bytes] | None:
        match = re.fullmatch(r"/(?:datasets|storage)/(.+?)/resolve/main/(.+)", self.path)
        name = f"{match[1]}/{match[2]}" if match else ""
        return (name, self.server.files[name]) if name in self.server.files else None

    def do_HEAD(self) -> None:
        found = self._find()
        if self._refused():
            self._answer(401)
        elif self.server.failures:
            self.server.failures -= 1
            self._answer(503)
        elif self.server.head is not None:
            self._answer(302 if "Location" in self.server.head else 200, self.server.head)
        elif found is None:
            self._answer(404, {"X-Error-Code": "EntryNotFound"})
        else:
            facts = {"X-Linked-Size": str(len(found[1])), "X-Repo-Commit": "c" * 40}
            if self.server.states_hash:
                digest = self.server.stated_hash or hashlib.sha256(found[1]).hexdigest()
                facts["X-Linked-ETag"] = f'"{digest}"'
            self._answer(302, {"Location": self._stored(), **facts})

    def _refused(self) -> bool:
        return self.server.token is not None and self.headers.get("Authorization") != f"Bearer {self.server.token}"

    def _stored(self) -> str:
        return self.path.replace("/datasets", self.server.storage, 1)

    def do_GET(self) -> None:
        if self.path.startswith("/datasets"):
            self._answer(401 if self._refused() else 302, {"Location": self._stored()})
            return
        assert self.headers.get("Authorization") is None
        found = self._find()
        assert found is not None
        name, content = found
        asked = self.headers.get("Range")
        self.server.gets.append((name.rsplit("/", 1)[1], asked))
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and self.server.ranges else 0  # type: ignore[index]
        self._answer(206 if start else 200, {"Content-Length": str(len(content) - start)})
        end = len(content) if self.server.break_after is None else min(len(content), start + self.server.break_after)
        for at in range(start, end, 50_000):
            if self.server.bytes_per_s:
                time.sleep(50_000 / self.server.bytes_per_s)
            with contextlib.suppress(ConnectionError):  # the client may have been killed
                self.wfile.write(content[at : min(end, at + 50_000)])
        self.close_connection = True

    def _answer(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(hub_module, "WAIT", tenacity.wait_fixed(0.01))
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(hub: Hub, folder: Path, *flags: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        return download.main(["--save_path", str(folder), "--retries", "3", *flags])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_parts_are_joined_and_the_corpus_unpacked(hub: Hub, tmp_path: Path) -> None:
    assert run(hub, tmp_path) == 0
    assert (tmp_path / "e5_Flat.index").read_bytes() == INDEX
    assert (tmp_path / "wiki-18.jsonl").read_bytes() == TEXT
    assert names(tmp_path) == {"e5_Flat.index", "part_aa", "part_ab", "wiki-18.jsonl", "wiki-18.jsonl.gz"}
    hub.gets.clear()
    assert run(hub, tmp_path) == 0
    assert hub.gets == []


def test_parts_may_be_deleted_once_joined(hub: Hub, tmp_path: Path) -> None:
    assert run(hub, tmp_path, "--delete_parts") == 0
    assert names(tmp_path) == {"e5_Flat.index", "wiki-18.jsonl"}
    assert (tmp_path / "e5_Flat.index").read_bytes() == INDEX


def test_a_broken_connection_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    hub.break_after = 700_000
    hub.failures = 2
    assert run(hub, tmp_path, "--only", "index") == 0
    assert (tmp_path / "e5_Flat.index").read_bytes() == INDEX
    assert [asked for name, asked in hub.gets if name == "part_aa"] == [
        None,
        *(f"bytes={start}-" for start in (700_000, 1_400_000, 2_100_000, 2_800_000)),
    ]


def test_without_ranges_it_starts_again(hub: Hub, tmp_path: Path) -> None:
    hub.ranges = False
    (tmp_path / "part_aa.part").write_bytes(b"x" * 1000)
    assert run(hub, tmp_path, "--only", "index") == 0
    assert (tmp_path / "e5_Flat.index").read_bytes() == INDEX


def test_it_gives_up_in_the_end(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub.break_after = 0
    assert run(hub, tmp_path, "--only", "index") == 1
    assert "gave up after 3 attempts" in caplog.text
    assert "the same command goes on later" in caplog.text
    hub.failures = 9
    assert run(hub, tmp_path, "--only", "index") == 1
    assert "the server answers 503 Service Unavailable" in caplog.text


def test_no_network_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "WAIT", tenacity.wait_fixed(0.01))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert download.main(["--save_dir", str(tmp_path), "--retries", "2"]) == 1
    assert "cannot be reached (" in caplog.text
    assert "check the network and HF_ENDPOINT; the same command goes on later" in caplog.text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert download.main(["--save_dir", str(tmp_path)]) == 1
    assert "HF_HUB_OFFLINE is set" in caplog.text


def test_a_private_hub_gets_the_token_and_the_storage_does_not(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.token = "hf_secret"
    assert run(hub, tmp_path, "--only", "index") == 1
    assert "the server answers 401 Unauthorized; expected the file: check HF_ENDPOINT, and HF_TOKEN" in caplog.text
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert run(hub, tmp_path, "--only", "index") == 0
    assert (tmp_path / "e5_Flat.index").read_bytes() == INDEX


def test_a_full_disk_is_told(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(_url: str, out: io.BufferedWriter, **_: object) -> None:
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"x")

    monkeypatch.setattr(hub_module, "http_get", write)
    assert run(hub, tmp_path, "--only", "index") == 1
    assert "No space left on device; expected --save_dir to be a folder" in caplog.text


def test_a_wrong_checksum_removes_the_file(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub.stated_hash = "0" * 64
    assert run(hub, tmp_path, "--only", "corpus") == 1
    assert f"expected SHA-256 {'0' * 64}, found {hashlib.sha256(PACKED).hexdigest()}" in caplog.text
    assert names(tmp_path) == set()


def test_a_checksum_can_be_given_where_the_server_states_none(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.states_hash = False
    assert run(hub, tmp_path, "--only", "corpus", "--sha256", f"wiki-18.jsonl.gz={'1' * 64}") == 1
    assert "expected SHA-256" in caplog.text
    assert run(hub, tmp_path, "--only", "corpus") == 0
    assert "no SHA-256 is known" in caplog.text


def test_a_missing_file_is_told_at_once(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    del hub.files["PeterJinGo/wiki-18-e5-index/part_ab"]
    assert run(hub, tmp_path, "--only", "index") == 1
    assert "answers 404" in caplog.text
    assert hub.gets == []


def test_a_broken_archive_is_told(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub.files["PeterJinGo/wiki-18-corpus/wiki-18.jsonl.gz"] = PACKED[:-2000]
    assert run(hub, tmp_path, "--only", "corpus") == 1
    assert "cannot be unpacked" in caplog.text
    assert not (tmp_path / "wiki-18.jsonl").exists()


def test_the_disk_is_checked_before_anything_is_downloaded(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = type("Usage", (), {"free": 7_500_000})
    monkeypatch.setattr(sizes.shutil, "disk_usage", lambda _: usage)
    assert run(hub, tmp_path, "--only", "index") == 1
    assert "expected 8.0 MB of free disk space" in caplog.text
    assert "found 7.5 MB" in caplog.text
    assert hub.gets == []
    assert run(hub, tmp_path, "--only", "index", "--delete_parts") == 0  # needs a copy of the second part only


@pytest.mark.parametrize("delete", [False, True])
@pytest.mark.parametrize("joined", [1, 2_999_999, 3_000_000, 3_500_000])
def test_an_interrupted_join_goes_on(hub: Hub, tmp_path: Path, joined: int, delete: bool) -> None:
    assert run(hub, tmp_path, "--only", "index") == 0
    (tmp_path / "e5_Flat.index").unlink()
    (tmp_path / "e5_Flat.index.part").write_bytes(INDEX[:joined])
    if delete and joined >= 3_000_000:
        (tmp_path / "part_aa").unlink()
    hub.gets.clear()
    assert run(hub, tmp_path, "--only", "index", *(["--delete_parts"] if delete else [])) == 0
    assert (tmp_path / "e5_Flat.index").read_bytes() == INDEX
    assert hub.gets == []


SMALL_BLOCKS = """
import sys
from huggingface_hub import constants
from local_dense_retriever import download
constants.DOWNLOAD_CHUNK_SIZE = 50_000  # of 10 MB, which a test would wait for
sys.exit(download.main())
"""


def test_a_killed_download_goes_on(hub: Hub, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SMALL_BLOCKS, "--save_dir", str(tmp_path), "--only", "index"]
    environment = {**os.environ, "HF_ENDPOINT": hub.url}
    hub.bytes_per_s = 1_000_000
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    partial, deadline = tmp_path / "part_aa.part", time.monotonic() + 60
    while not (partial.is_file() and partial.stat().st_size > 500_000):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    had = partial.stat().st_size
    hub.bytes_per_s = None
    hub.gets.clear()
    assert run(hub, tmp_path, "--only", "index") == 0
    assert (tmp_path / "e5_Flat.index").read_bytes() == INDEX
    assert hub.gets[0] == ("part_aa", f"bytes={had}-")


@pytest.mark.parametrize("pair", ["part_aa=12", f"part_zz={'0' * 64}", "0" * 64])
def test_bad_checksums_are_refused(pair: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        download.parse_args(["--save_dir", str(tmp_path), "--sha256", pair])


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ({"X-Repo-Commit": "c", "Content-Length": "0"}, "says how big the file is, found 0; check HF_ENDPOINT"),
        ({"X-Repo-Commit": "c", "X-Linked-Size": "-5"}, "found -5; check HF_ENDPOINT"),
        ({"X-Repo-Commit": "c", "X-Linked-Size": "many"}, "found None; check HF_ENDPOINT"),
        ({"Location": "/again"}, "cannot be reached (Exceeded"),
        ({"Content-Type": "text/html", "Content-Length": "3000000"}, "found another, such as a log-in page"),
    ],
)
def test_an_answer_that_is_no_file_is_told_and_makes_none(
    hub: Hub, tmp_path: Path, head: dict[str, str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    hub.head = head
    assert run(hub, tmp_path) == 1
    assert reason in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [("--endpoint", "hub"), ("--endpoint", ""), ("--retries", "0")])
def test_flags_that_cannot_work_are_refused(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        download.parse_args(["--save_dir", str(tmp_path), *flags])
