"""A retrieval server over a corpus of passages.

    python local_dense_retriever/retrieval_server.py --corpus_path corpus.jsonl.gz --port 8000
    python local_dense_retriever/retrieval_server.py --corpus_path wiki-18.jsonl --index_path e5_Flat.index \\
        --retriever_name e5 --faiss_gpu
    curl localhost:8000/retrieve -H 'Content-Type: application/json' \\
        -d '{"queries": ["capital of France"], "topk": 3, "return_scores": true}'

The first command searches by BM25. With `--port 0` the server takes a free port and, once it answers, writes its URL to
`--url_file`; until then connections wait. Requests of many clients are searched together (`batching.py`).
`GET /health` answers once the server is ready, `GET /metrics` returns counts and times for Prometheus. After SIGTERM or
ctrl-C the server finishes the requests under way, then exits with code 0.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import orjson
import uvicorn

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from local_dense_retriever.app import create_app
from local_dense_retriever.corpus import Corpus, open_corpus
from local_dense_retriever.options import batching_config, load_retriever, parse_args

logger = logging.getLogger("local_dense_retriever")

BACKLOG = 2048  # uvicorn's own


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; ValueError if the port is in use or the address is not this machine's.

    The socket listens at once: as long as two servers have bound the same port and neither listens, the later one would
    not notice (uvloop says nothing). Requests that come early wait.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        raise ValueError(
            f"cannot listen on {host}:{port}: {error}; choose another --port, 0 for a free one, or another --host"
        ) from None
    return sock


class Server(uvicorn.Server):
    """A uvicorn server that writes its URL to a file and the log once it answers."""

    def __init__(self, config: uvicorn.Config, url: str, url_file: Path | None) -> None:
        super().__init__(config)
        self._url, self._url_file = url, url_file

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        logger.info("answering at %s/retrieve", self._url)
        if self._url_file is not None:
            partial = self._url_file.with_name(f"{self._url_file.name}.{os.getpid()}")
            partial.write_text(self._url + "\n")
            partial.replace(self._url_file)


def serve(args: argparse.Namespace) -> None:
    """Bind the port, so that one in use is noticed before anything big is loaded; then load and answer requests."""
    if args.url_file is not None and not args.url_file.parent.is_dir():
        raise ValueError(f"--url_file: expected a file in a folder that exists, found none at {args.url_file.parent}")
    sock = bind(args.host, args.port)
    allow_many_connections()
    started = time.monotonic()
    corpus = open_corpus(args.corpus_path)
    retriever = load_retriever(args, corpus)
    logger.info("%d passages ready after %.1f s", len(corpus), time.monotonic() - started)
    gc.collect()
    gc.freeze()  # what is loaded stays: a full collection would go through all of it, many times a minute
    host = f"[{args.host}]" if ":" in args.host else args.host
    app = create_app(retriever, lambda index: passage_json(corpus, index), args.topk, batching_config(args))
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=30,
        timeout_keep_alive=75,  # a client's pool may hold a connection while a model generates
        backlog=BACKLOG,
    )
    Server(config, f"http://{host}:{sock.getsockname()[1]}", args.url_file).run(sockets=[sock])


def allow_many_connections() -> None:
    """Raise this process's limit of open files as far as the system allows; each client needs one."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # some systems call "no limit" what they do not accept
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def passage_json(corpus: Corpus, index: int) -> bytes:
    """A passage as JSON, with all its fields."""
    passage = corpus[index]
    try:
        return orjson.dumps(passage)
    except TypeError:  # lone surrogates, huge numbers
        return json.dumps(passage).encode()


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn takes over while it serves, and raises them again after
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        serve(parse_args(__doc__, argv))
    except ValueError as error:
        logger.error("%s", error)
        return 1
    except OSError as error:
        logger.error("%s; expected a corpus that can be read and a --url_file that can be written", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
