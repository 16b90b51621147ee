"""Building indices: resumed after a kill, sharded, never mixed, measured."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from local_dense_retriever import build_index, embeddings, indices
from local_dense_retriever.corpus import open_corpus
from local_dense_retriever.dense import PROBE, load_dense
from local_dense_retriever.embeddings import Embeddings, Origin, Shard, write_embeddings
from local_dense_retriever.indices import IndexOptions, build_and_measure, recall_of
from local_dense_retriever.presets import encoder_config
from local_dense_retriever.retrievers import Bm25Retriever
from tests.retriever.minilm import contents, minilm, passages

ROOT = Path(__file__).resolve().parents[2]
COUNT = 120


@pytest.fixture(scope="module")
def corpus_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", passages(COUNT))


def write_corpus(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(passage) + "\n" for passage in rows))
    return path


def run(corpus: Path, folder: Path, *flags: str) -> int:
    name = [] if "--retriever_name" in flags else ["--retriever_name", "minilm"]
    return build_index.main(
        ["--corpus_path", str(corpus), "--save_dir", str(folder), "--device", "cpu", "--threads", "2", *name, *flags]
    )


class CountingEncoder:
    """A deterministic encoder of four dimensions that counts, and fails when told."""

    dimension = 4

    def __init__(self, fail_after: int | None = None, name: str = "counting", shift: float = 0.0) -> None:
        self.encoded = 0
        self.fail_after, self.name, self.shift = fail_after, name, shift

    def _vectors(self, texts: list[str]) -> np.ndarray:
        rows = [[len(text), text.count("a"), text.count("e") + self.shift * len(text), 1.0] for text in texts]
        vectors = np.array(rows, np.float32).reshape(-1, 4)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        return self._vectors(texts)

    def encode_passages(self, texts: list[str]) -> np.ndarray:
        if self.fail_after is not None and self.encoded >= self.fail_after:
            raise KeyboardInterrupt
        self.encoded += len(texts)
        return self._vectors(texts)

    def describe(self) -> dict[str, Any]:
        return {"model": self.name, "pooling": "mean"}


def all_rows(folder: Path) -> np.ndarray:
    return np.concatenate(list(Embeddings(folder).blocks(7)))


def test_an_index_is_built_and_found_by_the_server_side(
    corpus_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert run(corpus_path, tmp_path, "--index_type", "flat", "hnsw", "--recall_queries", "20") == 0
    table = capsys.readouterr().out
    assert "recall@10" in table
    assert "hnsw" in table
    expected = minilm().encode_passages(contents(COUNT))
    np.testing.assert_allclose(all_rows(tmp_path), expected, atol=1e-3)
    retriever = load_dense(
        encoder_config("minilm"),
        open_corpus(corpus_path),
        index_path=tmp_path / "flat.index",
        corpus_path=corpus_path,
        device="cpu",
    )
    found = retriever.search(retriever.encode(contents(5)), 1)
    assert [hits[0].index for hits in found] == [0, 1, 2, 3, 4]
    caplog.set_level("INFO")
    assert run(corpus_path, tmp_path, "--index_type", "flat", "hnsw") == 0
    assert "has these indices already" in caplog.text
    caplog.clear()
    assert run(corpus_path, tmp_path, "--index_type", "hnsw", "--ef_search", "200", "--recall_queries", "20") == 0
    assert "has these indices already" not in caplog.text


def test_a_killed_run_goes_on(corpus_path: Path, tmp_path: Path) -> None:
    script = f"""
import sys, time
from local_dense_retriever import build_index, embeddings
write = embeddings.write_embeddings
build_index.write_embeddings = lambda *args: write(*args, chunk=8)
build_index.main({["--corpus_path", str(corpus_path), "--save_dir", str(tmp_path), "--retriever_name", "minilm"]!r})
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.DEVNULL)
    mark, deadline, done = tmp_path / "embeddings-00001-of-00001.json", time.monotonic() + 120, 0
    while done < 16:
        assert process.poll() is None
        assert time.monotonic() < deadline
        done = json.loads(mark.read_text())["done"] if mark.is_file() else 0
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = json.loads(mark.read_text())["done"]
    assert 16 <= done < COUNT
    data = tmp_path / "embeddings-00001-of-00001.npy"
    before = data.read_bytes()[: 128 + done * 384 * 2]
    data.write_bytes(data.read_bytes() + b"torn")  # as if the kill had come within a write
    assert run(corpus_path, tmp_path) == 0
    assert data.read_bytes()[: len(before)] == before
    np.testing.assert_allclose(all_rows(tmp_path), minilm().encode_passages(contents(COUNT)), atol=1e-3)


@pytest.mark.parametrize("fail_after", [0, 10, 20, 110])
def test_nothing_is_encoded_twice_but_the_last_chunk(corpus_path: Path, tmp_path: Path, fail_after: int) -> None:
    corpus = open_corpus(corpus_path)
    with pytest.raises(KeyboardInterrupt):
        write_embeddings(corpus, CountingEncoder(fail_after), tmp_path, Shard(), chunk=10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not complete: run --shard 1/1"):
        Embeddings(tmp_path)
    encoder = CountingEncoder()
    write_embeddings(corpus, encoder, tmp_path, Shard(), chunk=10)  # type: ignore[arg-type]
    assert encoder.encoded == COUNT - fail_after
    np.testing.assert_allclose(all_rows(tmp_path), encoder.encode_queries(contents(COUNT)), atol=1e-3)


@pytest.mark.parametrize("count", [3, 7, 200])
def test_shards_make_the_same_whole(corpus_path: Path, tmp_path: Path, count: int) -> None:
    corpus, encoder = open_corpus(corpus_path), CountingEncoder()
    for number in reversed(range(1, count + 1)):
        write_embeddings(corpus, encoder, tmp_path, Shard(number, count), chunk=10)  # type: ignore[arg-type]
    expected = encoder.encode_queries(contents(COUNT))
    np.testing.assert_allclose(all_rows(tmp_path), expected, atol=1e-3)
    sample = Embeddings(tmp_path).sample(1000, np.random.default_rng(0))
    np.testing.assert_allclose(sample, expected, atol=1e-3)
    with pytest.raises(ValueError, match=f"in {count} shards"):
        write_embeddings(corpus, encoder, tmp_path, Shard(), chunk=10)  # type: ignore[arg-type]


def test_shards_by_the_command_line(
    corpus_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_index, "Encoder", lambda *_, **__: CountingEncoder())
    assert run(corpus_path, tmp_path, "--shard", "2/2") == 0
    assert run(corpus_path, tmp_path) == 1
    assert "not complete: run --shard 1/2 first" in caplog.text
    assert run(corpus_path, tmp_path, "--shard", "1/2") == 0
    assert run(corpus_path, tmp_path) == 0
    assert faiss.read_index(str(tmp_path / "flat.index")).ntotal == COUNT


def test_embeddings_of_another_corpus_or_encoder_are_refused(corpus_path: Path, tmp_path: Path) -> None:
    corpus = open_corpus(corpus_path)
    write_embeddings(corpus, CountingEncoder(), tmp_path, Shard(1, 2))  # type: ignore[arg-type]
    write_embeddings(corpus, CountingEncoder(name="a copy elsewhere"), tmp_path, Shard(1, 2))  # type: ignore[arg-type]
    other = open_corpus(write_corpus(tmp_path / "other.jsonl", passages(COUNT)[::-1]))
    for shard in (Shard(1, 2), Shard(2, 2)):
        with pytest.raises(ValueError, match="is of another corpus"):
            write_embeddings(other, CountingEncoder(), tmp_path, shard)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="made by another encoder"):
            write_embeddings(corpus, CountingEncoder(shift=1), tmp_path, shard)  # type: ignore[arg-type]


@pytest.mark.parametrize("left", [b"", b"\x93NUMPY\x01\x00v", b"x" * 4000])
def test_a_file_that_is_cut_off_or_damaged_is_made_anew(corpus_path: Path, tmp_path: Path, left: bytes) -> None:
    corpus = open_corpus(corpus_path)
    write_embeddings(corpus, CountingEncoder(), tmp_path, Shard())  # type: ignore[arg-type]
    whole = all_rows(tmp_path)
    file = tmp_path / "embeddings-00001-of-00001.npy"
    assert np.load(file).shape == (COUNT, 4)
    file.write_bytes(left)
    with pytest.raises(ValueError, match="not complete: run --shard 1/1"):
        Embeddings(tmp_path)
    write_embeddings(corpus, CountingEncoder(), tmp_path, Shard())  # type: ignore[arg-type]
    np.testing.assert_array_equal(all_rows(tmp_path), whole)


def test_two_processes_do_not_write_one_shard(corpus_path: Path, tmp_path: Path) -> None:
    shard = Shard()
    with shard.file(tmp_path).open("ab") as file:
        embeddings._lock(file, shard.file(tmp_path))
        with pytest.raises(ValueError, match="another process is writing"):
            write_embeddings(open_corpus(corpus_path), CountingEncoder(), tmp_path, shard)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["0/4", "5/4", "4", "a/b", "1/0", "-1/4"])
def test_bad_shards_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--shard: found"):
        Shard.parse(text)


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10,500 vectors of 32 dimensions around 200 centres, as complete embeddings."""
    folder = tmp_path_factory.mktemp("clustered")
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((200, 32))[rng.integers(200, size=10_500)] + 0.4 * rng.standard_normal((10_500, 32))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    file = Shard().file(folder)
    np.save(file, vectors.astype(embeddings.HALF))
    embeddings._mark(file, Origin("0" * 32, 10_500, {}, 32, [0.0] * 32), 10_500, 10_500)
    return folder


def test_recall_of_every_kind(clustered: Path) -> None:
    held = Embeddings(clustered)
    queries = held.sample(100, np.random.default_rng(1)) + 0.05 * np.random.default_rng(2).standard_normal((100, 32))
    options = IndexOptions(nlist=64)
    reports = build_and_measure(held, indices.INDEX_TYPES, clustered, queries.astype(np.float32), options)
    recall = {report.index_type: report.recall for report in reports}
    assert recall["flat"] == {1: 1.0, 3: 1.0, 10: 1.0, 100: 1.0}
    assert recall["flat_fp16"][10] > 0.99
    assert recall["hnsw"][10] > 0.95
    assert 0.4 < recall["ivf_pq"][10] < 1.0
    for report in reports:
        index = faiss.read_index(str(clustered / f"{report.index_type}.index"))
        assert index.ntotal == 10_500
        assert index.metric_type == faiss.METRIC_INNER_PRODUCT
    assert faiss.read_index(str(clustered / "ivf_pq.index")).nprobe == 16  # a server searches as was measured here


def test_exact_search_equals_brute_force(clustered: Path) -> None:
    held = Embeddings(clustered)
    everything = np.concatenate(list(held.blocks()))
    queries = held.sample(9, np.random.default_rng(3))
    assert np.array_equal(indices.exact_search(held, queries, 5)[:, 0], np.argmax(queries @ everything.T, axis=1))


def test_recall_is_the_share_of_the_exact_ones() -> None:
    exact, found = np.array([[1, 2, 3], [4, 5, 6]]), np.array([[1, 3, 9], [7, -1, -1]])
    assert recall_of(found, exact) == {1: 0.5, 3: pytest.approx(1 / 3)}


def test_too_few_passages_for_ivf_pq_are_told(
    corpus_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_index, "Encoder", lambda *_, **__: CountingEncoder())
    assert run(corpus_path, tmp_path, "--index_type", "ivf_pq") == 1
    assert "expected at least 9,984 passages" in caplog.text


def test_too_little_memory_or_disk_is_told(clustered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indices, "available_memory", lambda: 1_000_000)
    with pytest.raises(ValueError, match=r"building it takes 1\.3 MB .* ivf_pq takes 0\.2 MB"):
        indices.build_index(Embeddings(clustered), "flat", IndexOptions())


def test_a_bm25_index(corpus_path: Path, tmp_path: Path) -> None:
    assert run(corpus_path, tmp_path / "bm25", "--retriever_name", "bm25") == 0
    retriever = Bm25Retriever.load(tmp_path / "bm25", open_corpus(corpus_path))
    (hits,) = retriever.search(retriever.encode([contents(COUNT)[7].split("\n")[0]]), 1)
    assert hits[0].index == 7
    assert run(corpus_path, tmp_path / "plain", "--retriever_name", "bm25", "--language", "none") == 0
    assert json.loads((tmp_path / "plain/sleuth.json").read_text())["language"] == "none"


@pytest.mark.parametrize(
    "flags",
    [
        ("--batch_size", "0"),
        ("--shard", "3/2"),
        ("--seed", "-1"),
        ("--index_type", "ball"),
        ("--language", "german"),  # of an encoder
        ("--language", "klingon", "--retriever_name", "bm25"),
    ],
)
def test_bad_flags_are_refused(tmp_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, tmp_path, *flags)
    assert f"{flags[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--queries_path", "nowhere.txt"), "--queries_path: nowhere.txt cannot be read"),
        (("--index_type", "flat", "ivf_pq"), "expected at least 9,984 passages"),
        (("--retriever_name", "none", "--retriever_model", "/no/where"), "cannot load the encoder '/no/where'"),
        (("--save_dir", "pyproject.toml"), "a folder --save_dir with space that can be written to"),
        (("--save_dir", "pyproject.toml", "--retriever_name", "bm25"), "a folder --save_dir with space"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_encoded(
    corpus_path: Path, tmp_path: Path, flags: tuple[str, ...], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(corpus_path, tmp_path, *flags) == 1
    assert reason in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "reason"), [({"pq_bytes": 3}, "divisor of the dimension 4"), ({"nlist": 20_000}, "20000")]
)
def test_options_that_do_not_fit_are_told(option: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        indices.check_options("ivf_pq", 10_000, 4, IndexOptions(**option))


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    index = faiss.IndexFlatIP(4)
    index.add(np.zeros((100_000, 4), np.float32))
    with pytest.raises(ValueError, match=r"/dev: the index cannot be written .*; free disk space"):
        indices._write(index, Path("/dev/full"))


def test_queries_come_from_a_file_or_from_passages(corpus_path: Path, tmp_path: Path) -> None:
    corpus = open_corpus(corpus_path)
    made = build_index.recall_queries(corpus, None, 5, seed=1)
    assert len(made) == 5
    assert all(0 < len(query.split()) <= build_index.QUERY_WORDS for query in made)
    (tmp_path / "q.txt").write_text("one\n\ntwo\nthree\n")
    assert build_index.recall_queries(corpus, tmp_path / "q.txt", 2, seed=1) == ["one", "two"]
    odd = [f"where{separator}is it?" for separator in "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r"]
    (tmp_path / "odd.txt").write_bytes(("\ufeff" + "\r\n".join(odd)).encode())
    assert build_index.recall_queries(corpus, tmp_path / "odd.txt", 99, seed=1) == odd
    assert PROBE not in made
