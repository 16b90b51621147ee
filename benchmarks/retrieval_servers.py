"""Servers that `benchmarks/retrieval.py` compares with.

    python -m benchmarks.retrieval_servers reference --corpus_path FILE --retriever_name bm25 --url_file FILE

reference: FastAPI as retrieval servers are usually written, a synchronous endpoint with pydantic models, so that each
request is encoded and searched by itself, in whichever thread of the pool takes it. floor: the same HTTP, but nothing
is searched.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bm25s
import orjson
import Stemmer
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from local_dense_retriever.app import RetrieveRequest
from local_dense_retriever.corpus import open_corpus
from local_dense_retriever.presets import encoder_config
from local_dense_retriever.retrieval_server import Server, bind

Search = Callable[[str, int], list[tuple[int, float]]]
TOPK = 3


class QueryRequest(BaseModel):
    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def reference(corpus: Sequence[dict[str, Any]], search: Search) -> FastAPI:
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(request: QueryRequest) -> dict[str, Any]:
        result = []
        for query in request.queries:
            found = search(query, request.topk or TOPK)
            if request.return_scores:
                result.append([{"document": corpus[index], "score": score} for index, score in found])
            else:
                result.append([corpus[index] for index, _ in found])
        return {"result": result}

    return app


def floor(corpus: Sequence[dict[str, Any]]) -> FastAPI:
    app = FastAPI()
    answer = orjson.dumps({"result": [[{"document": corpus[index], "score": 1.0} for index in range(TOPK)]]})

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        RetrieveRequest.model_validate_json(await request.body())
        return Response(answer, media_type="application/json")

    return app


def bm25_search(corpus: Sequence[dict[str, Any]]) -> Search:
    """As bm25s documents it."""
    stemmer = Stemmer.Stemmer("english")
    texts = [passage["contents"] for passage in corpus]
    index = bm25s.BM25(method="lucene")
    index.index(bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, show_progress=False), show_progress=False)

    def search(query: str, topk: int) -> list[tuple[int, float]]:
        tokens = bm25s.tokenize(query, stopwords="en", stemmer=stemmer, show_progress=False)
        indices, scores = index.retrieve(tokens, k=topk, show_progress=False)
        return list(zip(indices[0].tolist(), scores[0].tolist(), strict=True))

    return search


def dense_search(model_path: str, index_path: str) -> Search:
    """A plain forward of transformers with mean pooling, and FAISS.

    With one torch thread a request, as the pool's threads use all cores already: with torch's default, threads of
    threads wait for each other and a loaded server all but stops.
    """
    import faiss
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(model_path), AutoModel.from_pretrained(model_path).eval()
    index = faiss.read_index(index_path)
    faiss.omp_set_num_threads(1)

    def search(query: str, topk: int) -> list[tuple[int, float]]:
        torch.set_num_threads(1)  # holds for the calling thread
        with torch.inference_mode():
            inputs = tokenizer([query], return_tensors="pt")
            hidden = model(**inputs).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(-1)
            embedding = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        scores, indices = index.search(embedding.numpy(), topk)
        return list(zip(indices[0].tolist(), scores[0].tolist(), strict=True))

    return search


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["reference", "floor"])
    parser.add_argument("--corpus_path", required=True)
    parser.add_argument("--retriever_name", choices=["bm25", "dense"], required=True)
    parser.add_argument("--index_path", help="flat FAISS index by MiniLM")
    parser.add_argument("--url_file", type=Path, required=True)
    args = parser.parse_args()
    sock = bind("127.0.0.1", 0)
    corpus = open_corpus(args.corpus_path)
    if args.kind == "floor":
        app = floor(corpus)
    elif args.retriever_name == "bm25":
        app = reference(corpus, bm25_search(corpus))
    else:
        app = reference(corpus, dense_search(encoder_config("minilm").model, args.index_path))
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    Server(config, f"http://127.0.0.1:{sock.getsockname()[1]}", args.url_file).run(sockets=[sock])


if __name__ == "__main__":
    main()
