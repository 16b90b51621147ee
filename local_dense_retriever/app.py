"""The HTTP face of a retriever: `POST /retrieve` and `GET /health`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from local_dense_retriever.retrievers import Ranked, Retriever

MAX_TOPK = 100
MAX_QUERIES = 1024
MAX_QUERY_CHARS = 8192


class RetrieveRequest(BaseModel):
    """What `POST /retrieve` takes."""

    model_config = ConfigDict(strict=True, extra="forbid")

    queries: Annotated[list[str], Field(max_length=MAX_QUERIES)]
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK)] | None = None
    """None: the server's --topk."""
    return_scores: bool = False


class RetrieveResponse(BaseModel):
    """What it answers."""

    result: list[list[dict[str, Any]]]
    """For each query its passages, best first: the documents, or `{"document", "score"}` with scores."""


def create_app(retriever: Retriever, passages: Sequence[dict[str, Any]], default_topk: int) -> FastAPI:
    """The application around a loaded retriever; one thread searches, while the event loop stays free."""
    searcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        searcher.shutdown()

    app = FastAPI(title="Passage retrieval", lifespan=lifespan)

    def find(queries: Sequence[str], topk: int) -> list[list[Ranked]]:
        return retriever.search(retriever.encode(queries), topk) if queries else []

    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest) -> RetrieveResponse:
        check_queries(request.queries)
        topk = request.topk or default_topk
        found = await asyncio.get_running_loop().run_in_executor(searcher, find, request.queries, topk)
        return RetrieveResponse(result=[render(hits, passages, request.return_scores) for hits in found])

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ready"}

    return app


def check_queries(queries: Sequence[str]) -> None:
    """Refuse what cannot be searched: 422 for a blank query, 413 for a huge one."""
    for number, query in enumerate(queries):
        if not query.strip():
            raise HTTPException(422, f"queries[{number}] is blank; expected text to search for")
        if len(query) > MAX_QUERY_CHARS:
            raise HTTPException(
                413, f"queries[{number}] has {len(query)} characters; at most {MAX_QUERY_CHARS} are allowed"
            )


def render(hits: Sequence[Ranked], passages: Sequence[dict[str, Any]], return_scores: bool) -> list[dict[str, Any]]:
    """The hits of one query as JSON; see `RetrieveResponse`."""
    if return_scores:
        return [{"document": passages[hit.index], "score": hit.score} for hit in hits]
    return [passages[hit.index] for hit in hits]
