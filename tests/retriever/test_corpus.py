"""Mapped and packed corpora."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from local_dense_retriever import corpus as corpus_module
from local_dense_retriever.corpus import open_corpus, read_corpus

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "data/demo/corpus.jsonl.gz"


@pytest.fixture(scope="module")
def demo_jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_bytes(gzip.decompress(DEMO.read_bytes()))
    return path


def test_a_mapped_corpus_equals_one_that_is_read(demo_jsonl: Path) -> None:
    mapped, packed, read = open_corpus(demo_jsonl), open_corpus(DEMO), read_corpus(DEMO)
    assert list(mapped) == [mapped[i] for i in range(len(mapped))] == list(packed) == read
    assert mapped[-1] == read[-1]
    assert mapped[10:20:3] == read[10:20:3]
    assert mapped[np.int64(7)] == read[7]
    assert mapped.fingerprint == packed.fingerprint
    with pytest.raises(IndexError):
        mapped[len(mapped)]


def test_threads_may_share_a_mapped_corpus(demo_jsonl: Path) -> None:
    mapped, read = open_corpus(demo_jsonl), read_corpus(DEMO)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda i: mapped[i], range(0, len(read), 7))) == read[::7]


def test_offsets_are_kept_and_made_anew_when_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"contents": "a"}\n')
    first = open_corpus(path)
    assert (tmp_path / "c.jsonl.offsets.npy").is_file()
    monkeypatch.setattr(corpus_module, "_make_offsets", lambda *_: pytest.fail("made anew"))
    assert open_corpus(path).fingerprint == first.fingerprint
    monkeypatch.undo()
    path.write_text('{"contents": "b"}\n')
    os.utime(path, ns=(0, 5))
    second = open_corpus(path)
    assert second[0]["contents"] == "b"
    assert second.fingerprint != first.fingerprint
    path.write_text('{"contents": "b"}\n{"contents": "c"}\n')
    assert len(open_corpus(path)) == 2


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", b"x" * 500])
def test_damaged_offsets_are_made_anew(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"contents": "a"}\n')
    open_corpus(path)
    (tmp_path / "c.jsonl.offsets.npy").write_bytes(damage)
    assert open_corpus(path)[0] == {"contents": "a"}


def test_offsets_of_a_folder_that_cannot_be_written_go_to_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"contents": "a"}\n')
    make = corpus_module._make_offsets

    def read_only(corpus: Path, file: Path) -> None:  # root may write anywhere, so a chmod would not do
        if file.parent == tmp_path:
            raise PermissionError(13, "read-only")
        make(corpus, file)

    monkeypatch.setattr(corpus_module, "_make_offsets", read_only)
    assert len(open_corpus(path, tmp_path / "cache")) == 1
    monkeypatch.setattr(corpus_module, "_make_offsets", lambda *_: pytest.fail("made anew"))
    assert len(open_corpus(path, tmp_path / "cache")) == 1
    assert {p.name for p in tmp_path.iterdir()} == {"c.jsonl", "cache"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no passage"),
        ("\n \n", "no passage"),
        ('{"contents": "a"}\n{', "line 2: expected JSON"),
        ('\n\n{"id": 1}', "line 3: expected an object with 'contents', a string, found"),
        ('{"contents": 5}', "line 1: expected an object with 'contents'"),
        ("[1]", "line 1: expected an object"),
        pytest.param('{"contents": "a"}\n' + "[" * 100_000, "line 2: expected JSON", id="deep"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_bad_line_is_named(tmp_path: Path, text: str, reason: str, packed: bool) -> None:
    path = tmp_path / ("c.jsonl.gz" if packed else "c.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    for reader in (open_corpus, read_corpus):
        with pytest.raises(ValueError, match=reason):
            reader(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no half-made offsets


@pytest.mark.parametrize("damage", [lambda packed: b"{}", lambda packed: packed[:-9], lambda packed: packed + b"more"])
def test_a_broken_gz_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(damage(gzip.compress(b'{"contents": "a"}')))
    with pytest.raises(ValueError, match=r"c.jsonl.gz cannot be unpacked .*; expected a whole .gz file"):
        open_corpus(path)


def test_lines_without_end_blank_lines_and_other_shapes(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('\r\n{"contents": "a", "score": NaN}\r\n\n{"title": "T", "text": "b"}\n{"text": "é"}')
    corpus = open_corpus(path)
    assert [p["contents"] for p in corpus] == [corpus[i]["contents"] for i in range(3)] == ["a", '"T"\nb', '""\né']


def test_a_big_packed_corpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "MAX_PACKED_BYTES", 10)
    with pytest.raises(ValueError, match="gunzip --keep"):
        open_corpus(DEMO)


def test_a_missing_corpus_is_told() -> None:
    with pytest.raises(ValueError, match="no corpus at nowhere"):
        open_corpus("nowhere.jsonl")


def test_a_file_that_changes_while_it_is_in_use_is_told(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"contents": "aaaa"}\n')
    corpus = open_corpus(path)
    with path.open("r+b") as file:
        file.write(b"garbage ")
    with pytest.raises(ValueError, match="no longer the passage"):
        corpus[0]


def test_memory_stays_flat(tmp_path: Path) -> None:
    """50 MB are opened with less than 15 MB, of which none is the text."""
    path = tmp_path / "big.jsonl"
    line = json.dumps({"id": "0", "contents": '"Title"\n' + "some words " * 90}) + "\n"
    path.write_text(line * 50_000)
    script = f"""
import resource
from local_dense_retriever.corpus import open_corpus
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
corpus = open_corpus({str(path)!r})
print(len(corpus), peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    count, kilobytes = map(int, done.stdout.split())
    assert count == 50_000
    assert kilobytes < 15_000
