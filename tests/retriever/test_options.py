"""The server's flags: what is refused, and what retriever they give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from local_dense_retriever import build_index, options
from local_dense_retriever.corpus import Corpus, open_corpus
from local_dense_retriever.dense import DenseRetriever
from local_dense_retriever.options import batching_config, load_retriever, parse_args
from local_dense_retriever.retrievers import Bm25Retriever, HybridRetriever

TEXTS = ["The capital of France is Paris.", "The capital of Spain is Madrid.", "A tragedy by Shakespeare."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, and its dense and BM25 indices as build_index.py makes them."""
    folder = tmp_path_factory.mktemp("retrieval")
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": str(i), "contents": text}) + "\n" for i, text in enumerate(TEXTS)))
    for name in ("minilm", "bm25"):
        flags = ["--corpus_path", str(corpus), "--save_dir", str(folder / name), "--retriever_name", name]
        assert not build_index.main(flags)
    return folder


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    return open_corpus(folder / "corpus.jsonl")


def load(folder: Path, corpus: Corpus, flags: str) -> object:
    words = ["--corpus_path", str(folder / "corpus.jsonl"), *flags.format(folder=folder).split()]
    return load_retriever(parse_args(None, words), corpus)


DENSE = "--index_path {folder}/minilm/flat.index"


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("", Bm25Retriever),
        ("--index_path {folder}/bm25", Bm25Retriever),
        (f"--retriever_name minilm {DENSE}", DenseRetriever),
        (f"--retriever_name hybrid:minilm {DENSE} --bm25_index_path {{folder}}/bm25", HybridRetriever),
    ],
)
def test_what_the_flags_load(folder: Path, corpus: Corpus, flags: str, kind: type) -> None:
    retriever = load(folder, corpus, flags)
    assert isinstance(retriever, kind)
    found = retriever.search(retriever.encode(["capital of Spain", "a play by Shakespeare"]), 1)
    assert [[hit.index for hit in hits] for hits in found] == [[1], [2]]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--topk 0", "--topk: found 0, expected 1 to 100"),
        ("--max_batch_size 0", "--max_batch_size: found 0, expected 1 or more"),
        ("--max_wait_ms nan", "--max_wait_ms: found nan, expected 0 or more"),
        ("--max_wait_ms -1", "--max_wait_ms: found -1.0, expected 0 or more"),
        ("--cache_size -1", "--cache_size: found -1"),
        ("--faiss_threads 0", "--faiss_threads: found 0"),
        ("--faiss_gpu", "--faiss_gpu has no meaning with --retriever_name bm25"),
        ("--no-normalize", "--normalize has no meaning with --retriever_name bm25"),
        ("--bm25_index_path x", "goes with --retriever_name hybrid"),
        ("--retriever_name e6 --index_path x", "expected one of: bm25, e5, bge"),
        ("--retriever_name hybrid:e6 --index_path x", "expected one of: bm25, e5, bge"),
        ("--retriever_name e5", "--retriever_name e5 needs --index_path"),
        ("--language klingon", "--language: found 'klingon', expected one of: arabic, armenian"),
        ("--retriever_name hybrid --index_path x --language klingon", "swedish, tamil, turkish, yiddish, none"),
        (
            "--retriever_name e5 --index_path x --language german",
            "found 'german', expected none with --retr",
        ),
        ("--retriever_name e5 --index_path x --pooling max", "invalid choice: 'max'"),
    ],
)
def test_flags_that_make_no_sense_end_at_once(flags: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_args(None, ["--corpus_path", "nowhere", *flags.split()])
    assert end.value.code == 2
    assert reason in capsys.readouterr().err


def test_an_index_of_another_corpus_or_encoder_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"contents": "one"}) + "\n")
    with pytest.raises(ValueError, match="passages"):
        load(folder, open_corpus(path), f"--retriever_name minilm {DENSE}")
    with pytest.raises(ValueError, match="made with another encoder or other settings"):
        load(folder, open_corpus(folder / "corpus.jsonl"), f"--retriever_name minilm {DENSE} --query_prefix query:")


def test_a_bm25_index_that_cannot_be_built_in_memory_is_refused(
    folder: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "available_memory", lambda: 100)
    with pytest.raises(ValueError, match=r"0.0 MB are available; build it once .* and give --index_path"):
        load(folder, corpus, "")
    load(folder, corpus, "--index_path {folder}/bm25")


def test_what_goes_to_the_batcher() -> None:
    flags = "--corpus_path x --topk 5 --max_batch_size 8 --max_wait_ms 2 --max_queue 9 --cache_size 0"
    assert batching_config(parse_args(None, flags.split())) == (8, 0.002, 9, 0, 5)
