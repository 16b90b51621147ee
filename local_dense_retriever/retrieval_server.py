"""A retrieval server over a corpus of passages.

    python local_dense_retriever/retrieval_server.py --corpus_path corpus.jsonl.gz --port 8000
    curl localhost:8000/retrieve -H 'Content-Type: application/json' \\
        -d '{"queries": ["capital of France"], "topk": 3, "return_scores": true}'

`--port 0` takes a free port; `--url_file` says which, once the server answers. SIGTERM and ctrl-C finish
the requests under way, then end the process with code 0.
"""

from __future__ import annotations

import argparse
import logging
import os
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

from local_dense_retriever.app import MAX_TOPK, create_app
from local_dense_retriever.batching import BatchingConfig
from local_dense_retriever.corpus import read_corpus
from local_dense_retriever.retrievers import RETRIEVER_NAMES, load_retriever

logger = logging.getLogger("local_dense_retriever")

BACKLOG = 2048  # uvicorn's own


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus_path", required=True, help="passages, a .jsonl or .jsonl.gz file")
    parser.add_argument("--retriever_name", default="bm25", help=f"one of: {', '.join(RETRIEVER_NAMES)} [bm25]")
    parser.add_argument("--topk", type=int, default=3, help="passages per query where a request does not say [3]")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1]")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: a free one [8000]")
    parser.add_argument("--max_batch_size", type=int, default=64, help="queries searched together, at most [64]")
    parser.add_argument(
        "--max_wait_ms",
        type=float,
        default=0.0,
        help="milliseconds an idle server may wait for a batch to fill; while it is busy batches fill anyway [0]",
    )
    parser.add_argument("--max_queue", type=int, default=4096, help="queries that may wait; more get 503 [4096]")
    parser.add_argument("--cache_size", type=int, default=10000, help="queries whose results are kept; 0: none [10000]")
    parser.add_argument("--url_file", type=Path, help="file to write the server's URL to, once it answers")
    args = parser.parse_args(argv)
    if args.retriever_name not in RETRIEVER_NAMES:
        parser.error(f"--retriever_name: found {args.retriever_name!r}, expected one of: {', '.join(RETRIEVER_NAMES)}")
    if not 1 <= args.topk <= MAX_TOPK:
        parser.error(f"--topk: found {args.topk}, expected 1 to {MAX_TOPK}")
    for flag, least in {"max_batch_size": 1, "max_wait_ms": 0, "max_queue": 1, "cache_size": 0}.items():
        if getattr(args, flag) < least:
            parser.error(f"--{flag}: found {getattr(args, flag)}, expected {least} or more")
    return args


def batching_config(args: argparse.Namespace) -> BatchingConfig:
    return BatchingConfig(args.max_batch_size, args.max_wait_ms / 1000, args.max_queue, args.cache_size, args.topk)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; ValueError if the port is in use or the address is not this machine's.

    Listening at once, not only bound: while neither listens two servers may bind the same port, and the later one
    would not notice (uvloop says nothing). Requests that come early wait.
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
            f"cannot listen on {host}:{port}: {error}; choose another --port, or 0 for a free one"
        ) from None
    return sock


class Server(uvicorn.Server):
    """A uvicorn server that tells its URL once it answers."""

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
    """Bind first, so that a port in use is known before anything big is loaded; then load and answer."""
    sock = bind(args.host, args.port)
    started = time.monotonic()
    passages = read_corpus(args.corpus_path)
    retriever = load_retriever(args.retriever_name, passages)
    logger.info("%d passages ready after %.1f s", len(passages), time.monotonic() - started)
    host = f"[{args.host}]" if ":" in args.host else args.host
    config = uvicorn.Config(
        create_app(retriever, lambda index: orjson.dumps(passages[index]), args.topk, batching_config(args)),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=30,
    )
    Server(config, f"http://{host}:{sock.getsockname()[1]}", args.url_file).run(sockets=[sock])


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn takes over while it serves, and raises them again after
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        serve(parse_args(argv))
    except ValueError as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
