"""A retriever whose searches a test controls, and a server in a thread around any retriever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import orjson
import uvicorn

from local_dense_retriever.app import create_app
from local_dense_retriever.batching import BatchingConfig
from local_dense_retriever.retrieval_server import bind
from local_dense_retriever.retrievers import Ranked, Retriever


class ScriptedRetriever:
    """Finds for a query the passages 0, 1, 2, ... as many as asked; the first one's score is the query's length.

    Remembers its batches. While `gate` is cleared it waits in a search, `entered` tells that it does. It raises on a
    query that holds "boom", and finds nothing for "nothing".
    """

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    @property
    def asked(self) -> list[str]:
        return [query for batch in self.batches for query in batch]

    def encode(self, queries: Sequence[str]) -> list[str]:
        self.batches.append(list(queries))
        return list(queries)

    def search(self, encoded: Sequence[str], topk: int) -> list[list[Ranked]]:
        self.entered.release()
        assert self.gate.wait(30)
        if any("boom" in query for query in encoded):
            raise RuntimeError("out of memory")
        return [
            [] if query == "nothing" else [Ranked(rank, float(len(query) - rank)) for rank in range(topk)]
            for query in encoded
        ]


def fetch(index: int) -> bytes:
    return orjson.dumps({"id": str(index), "contents": f'"T{index}"\ntext'})


@contextmanager
def serving(retriever: Retriever, topk: int = 3, config: BatchingConfig | None = None) -> Iterator[str]:
    """The URL of a server in a thread of this process; it is stopped gracefully at the end."""
    sock = bind("127.0.0.1", 0)
    app = create_app(retriever, fetch, topk, config or BatchingConfig())
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=20))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
