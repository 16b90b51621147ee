"""Micro-batching with a real encoder: whoever else asks, a query's answer stays the same."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
from pathlib import Path

import faiss
import pytest

from local_dense_retriever.batching import Batcher, BatchingConfig, Hit
from local_dense_retriever.dense import DenseRetriever
from local_dense_retriever.encoders import Encoder
from local_dense_retriever.metrics import Metrics
from local_dense_retriever.presets import encoder_config
from local_dense_retriever.retrievers import Bm25Retriever, HybridRetriever, Ranked, Retriever

CORPUS = Path(__file__).resolve().parents[2] / "data/demo/corpus.jsonl.gz"
PASSAGES = 60


@pytest.fixture(scope="module")
def contents() -> list[str]:
    with gzip.open(CORPUS, "rt") as file:
        return [json.loads(line)["contents"][:200] for line in itertools.islice(file, PASSAGES)]


@pytest.fixture(scope="module")
def dense(contents: list[str]) -> DenseRetriever:
    encoder = Encoder(encoder_config("minilm"), device="cpu")
    index = faiss.IndexFlatIP(encoder.dimension)
    index.add(encoder.encode_passages(contents))
    return DenseRetriever(encoder, index)


def batched(retriever: Retriever, queries: list[str], topk: int) -> list[list[Hit]]:
    """The answers to clients that ask one query each, all at once."""

    async def main() -> list[list[Hit]]:
        config = BatchingConfig(max_batch_size=16, max_wait_seconds=0.05)
        batcher = Batcher(retriever, lambda index: b"%d" % index, config, Metrics())
        batcher.start()
        answers = await asyncio.gather(*(batcher.search([query], topk) for query in queries))
        await batcher.close()
        return [answer[0] for answer in answers]

    return asyncio.run(main())


def alone(retriever: Retriever, query: str, topk: int) -> list[Ranked]:
    return retriever.search(retriever.encode([query]), topk)[0]


def test_dense_answers_do_not_depend_on_the_batch(dense: DenseRetriever, contents: list[str]) -> None:
    queries = [text.split("\n")[0] + " " + " ".join(text.split()[3 : 3 + n]) for n, text in enumerate(contents[:40])]
    for query, hits in zip(queries, batched(dense, queries, 5), strict=True):
        expected = alone(dense, query, 5)
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in expected], abs=1e-5)
        gaps = [one.score - other.score for one, other in itertools.pairwise(expected)]
        if min(gaps) > 1e-4:  # nearer ones may change places
            assert [int(hit.document) for hit in hits] == [hit.index for hit in expected]


def test_hybrid_answers_hold_what_both_rank_first(dense: DenseRetriever, contents: list[str]) -> None:
    words = Bm25Retriever.build({"contents": text} for text in contents)
    hybrid = HybridRetriever([words, dense])
    queries = [text.split("\n")[0].strip('"') for text in contents[:20]]
    agreed = 0
    for query, hits in zip(queries, batched(hybrid, queries, 3), strict=True):
        firsts = {alone(retriever, query, 1)[0].index for retriever in (words, dense)}
        if len(firsts) == 1:
            agreed += 1
            assert int(hits[0].document) in firsts
            assert hits[0].score == pytest.approx(2 / 61)
    assert agreed > 5
