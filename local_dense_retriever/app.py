"""The HTTP face of a retriever: `POST /retrieve`, `GET /health` and `GET /metrics`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from local_dense_retriever.batching import Batcher, BatchingConfig, Hit, QueueFullError, SearchFailedError
from local_dense_retriever.metrics import Metrics
from local_dense_retriever.retrievers import Retriever

# The limits of a request, which docs/retrieval.md lists for users. A refusal names the limit and what was found.
MAX_TOPK = 100
MAX_QUERIES = 1024
MAX_QUERY_CHARS = 8192
"""Of each query. Encoders read 512 tokens at most, some 2,500 characters; this bounds what BM25 does for a client."""
MAX_BODY_BYTES = 16 * 1024 * 1024
RETRY_AFTER_SECONDS = 1
CLIENT_GONE = 499  # nginx's; no one reads it but the metrics


def _not_blank(query: str) -> str:
    if not query.strip():
        raise ValueError("is blank; expected text to search for")
    return query


Query = Annotated[
    str, Field(max_length=MAX_QUERY_CHARS, json_schema_extra={"pattern": r"\S"}), AfterValidator(_not_blank)
]


def _whole(number: Any) -> Any:
    """Turn 3.0 into 3: JSON does not distinguish them."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


class RetrieveRequest(BaseModel):
    """The body of `POST /retrieve`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    queries: Annotated[list[Query], Field(max_length=MAX_QUERIES)]
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK), BeforeValidator(_whole)] | None = None
    """None: the server's --topk."""
    return_scores: bool = False


class Passage(BaseModel):
    """A passage of the corpus with all its fields."""

    model_config = ConfigDict(extra="allow")

    contents: str


class ScoredPassage(BaseModel):
    document: Passage
    score: float


class RetrieveResponse(BaseModel):
    """For each query its passages, best first; with `return_scores` each passage comes with its score."""

    result: list[list[Passage]] | list[list[ScoredPassage]]


class Refusal(BaseModel):
    """Why a request was not answered."""

    detail: str


REFUSALS: dict[int | str, dict[str, Any]] = {
    413: {"model": Refusal, "description": "The body is too long, or holds more queries than the queue"},
    415: {"model": Refusal, "description": "The body is not said to be JSON"},
    422: {"model": Refusal, "description": "The body is not a request"},
    500: {"model": Refusal, "description": "The search failed"},
    503: {
        "model": Refusal,
        "description": "Too many queries wait",
        "headers": {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}},
    },
}
REQUEST_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": RetrieveRequest.model_json_schema()}}}
}


def create_app(
    retriever: Retriever, fetch: Callable[[int], bytes], default_topk: int, config: BatchingConfig
) -> FastAPI:
    """The web application for a loaded retriever; `fetch(index)` returns a passage as JSON."""
    metrics = Metrics()
    batcher = Batcher(retriever, fetch, config, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await batcher.close()

    app = FastAPI(title="Passage retrieval", lifespan=lifespan)
    app.add_middleware(CountAnswers, metrics=metrics)

    @app.post(
        "/retrieve",
        response_model=None,
        responses={200: {"model": RetrieveResponse}, **REFUSALS},
        openapi_extra=REQUEST_BODY,
    )
    async def retrieve(request: Request) -> Response:
        asked = parse_request(await read_body(request))
        if len(asked.queries) > config.max_queue:  # would never fit
            raise HTTPException(
                413, f"{len(asked.queries)} queries; the queue holds {config.max_queue}, ask for fewer at once"
            )
        start = time.perf_counter()
        search = batcher.search(asked.queries, asked.topk or default_topk)
        try:
            found = await unless_disconnected(request.receive, search)
        except QueueFullError as error:
            raise HTTPException(503, str(error), {"Retry-After": str(RETRY_AFTER_SECONDS)}) from None
        except SearchFailedError as error:
            raise HTTPException(500, f"the search failed: {error}") from None
        metrics.request_seconds.observe(time.perf_counter() - start)
        return Response(render(found, asked.return_scores), media_type="application/json")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ready"}

    @app.get("/metrics", response_class=Response)
    async def metrics_text() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


async def read_body(request: Request) -> bytes:
    """The body of a request whose type is JSON; HTTPException if it has another type or is too long.

    A body that is too long is read to its end, up to a limit, and thrown away: a client that is cut off while it sends
    would not see the answer.
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HTTPException(415, f"expected Content-Type: application/json, found {content_type[:80]!r}")
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= MAX_BODY_BYTES:
                chunks.append(chunk)
            elif size > 8 * MAX_BODY_BYTES:
                break
    except ClientDisconnect:
        raise HTTPException(CLIENT_GONE, "the client has gone") from None
    if size > MAX_BODY_BYTES:
        raise HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes; ask in several requests")
    return b"".join(chunks)


def parse_request(body: bytes) -> RetrieveRequest:
    """The request in a body; HTTPException says what is wrong with it."""
    try:
        return RetrieveRequest.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
    detail = "; ".join(f"{_place(fault['loc'])}: {fault['msg']}{_found(fault)}" for fault in faults[:5])
    raise HTTPException(422, detail)


def _found(fault: Mapping[str, Any]) -> str:
    """What was found instead, if it is short enough to be quoted."""
    value = fault["input"]
    if fault["type"] == "string_too_long":
        return f", found {len(value)}"
    return (
        f", found {value!r}" if isinstance(value, int | float) or (isinstance(value, str) and len(value) < 80) else ""
    )


def _place(location: Sequence[int | str]) -> str:
    """`queries[3]` for ("queries", 3)."""
    return "".join(f"[{part}]" if isinstance(part, int) else part for part in location) or "body"


async def unless_disconnected(receive: Receive, search: Awaitable[list[list[Hit]]]) -> list[list[Hit]]:
    """The result of `search`, which is cancelled if the client goes away. The request's body must have been read."""
    searching = asyncio.ensure_future(search)
    watching = asyncio.ensure_future(receive())  # the next message can only be that the client has gone
    watching.add_done_callback(lambda _: searching.cancel())  # no effect on a search that is over
    try:
        return await searching
    except asyncio.CancelledError:
        if watching.done() and not watching.cancelled():
            raise HTTPException(CLIENT_GONE, "the client has gone") from None
        raise
    finally:
        watching.cancel()


def render(found: Sequence[Sequence[Hit]], return_scores: bool) -> bytes:
    """The JSON of an answer; see `RetrieveResponse`."""
    if return_scores:
        result: list[list[Any]] = [
            [{"document": orjson.Fragment(hit.document), "score": hit.score} for hit in hits] for hits in found
        ]
    else:
        result = [[orjson.Fragment(hit.document) for hit in hits] for hits in found]
    return orjson.dumps({"result": result})


class CountAnswers:
    """Counts every answer by path and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status = 500  # if an exception gets here

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        finally:
            path = scope["path"] if scope["path"] in ("/retrieve", "/health", "/metrics") else "other"
            self._metrics.requests.labels(path, status).inc()
