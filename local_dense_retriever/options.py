"""The flags of the retrieval server, and how they become a retriever."""

from __future__ import annotations

import argparse
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path

from local_dense_retriever.app import MAX_TOPK
from local_dense_retriever.batching import BatchingConfig
from local_dense_retriever.corpus import Corpus
from local_dense_retriever.presets import PRESETS, add_encoder_flags, config_from_flags
from local_dense_retriever.retrievers import HybridRetriever, Retriever, load_bm25
from local_dense_retriever.sizes import available_memory, corpus_bytes, gigabytes
from local_dense_retriever.words import DEFAULT_LANGUAGE, language_fault

logger = logging.getLogger(__name__)

BM25_BUILD_FACTOR = 10
"""Memory that building a BM25 index takes, over the bytes of the text; 7 were measured on the demo's corpus."""
ENCODER_FLAGS = (
    "retriever_model",
    "passage_model",
    "query_prefix",
    "passage_prefix",
    "pooling",
    "normalize",
    "max_length",
    "fp16",
    "device",
)
FAISS_FLAGS = ("faiss_gpu", "faiss_fp16", "faiss_threads")


def parse_args(description: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags, and check what needs no file; errors end the process as argparse does."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    _add_retrieval_flags(parser.add_argument_group("what is searched"))
    add_encoder_flags(parser)
    _add_faiss_flags(parser.add_argument_group("FAISS"))
    _add_server_flags(parser.add_argument_group("the server"))
    args = parser.parse_args(argv)
    if fault := _fault(args):
        parser.error(fault)
    return args


def _add_retrieval_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--corpus_path", required=True, help="passages, a .jsonl or .jsonl.gz file")
    group.add_argument("--index_path", help="FAISS index; with bm25 an index folder [bm25: built in memory]")
    group.add_argument(
        "--retriever_name",
        default="bm25",
        help=f"bm25; an encoder: {', '.join(PRESETS)}, or any name with --retriever_model; hybrid or hybrid:NAME: "
        "bm25 and an encoder [e5], joined by reciprocal rank fusion [bm25]",
    )
    group.add_argument(
        "--language",
        help="language of bm25's stemmer and stop words, such as german; none uses neither "
        f"[that of its index; {DEFAULT_LANGUAGE} without one]",
    )
    group.add_argument("--bm25_index_path", help="hybrid: the folder of bm25's index [built in memory]")
    group.add_argument("--topk", type=int, default=3, help="passages per query if a request does not say [3]")


def _add_faiss_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--faiss_gpu", action="store_true", help="spread the index over all GPUs")
    group.add_argument("--faiss_fp16", action="store_true", help="hold a flat index in half precision")
    group.add_argument("--faiss_threads", type=int, help="CPU threads of a search [all cores]")


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1]")
    group.add_argument("--port", type=int, default=8000, help="port to listen on; 0: a free one [8000]")
    group.add_argument("--url_file", type=Path, help="file to write the server's URL to, once it answers")
    group.add_argument("--max_batch_size", type=int, default=64, help="most queries searched together [64]")
    group.add_argument(
        "--max_wait_ms",
        type=float,
        default=0.0,
        help="milliseconds that an idle server waits for a batch to fill; a busy one need not wait [0]",
    )
    group.add_argument("--max_queue", type=int, default=4096, help="most queries that wait; others get 503 [4096]")
    group.add_argument(
        "--cache_size",
        type=int,
        default=10_000,
        help="how many queries' results are kept, some 2 KB each at topk 3; 0: none [10000]",
    )


def _fault(args: argparse.Namespace) -> str | None:
    """A sentence about what is wrong with the flags; None if nothing is."""
    if not 1 <= args.topk <= MAX_TOPK:
        return f"--topk: found {args.topk}, expected 1 to {MAX_TOPK}"
    for flag, least in {"max_batch_size": 1, "max_wait_ms": 0, "max_queue": 1, "cache_size": 0}.items():
        if not least <= getattr(args, flag) < math.inf:
            return f"--{flag}: found {getattr(args, flag)}, expected {least} or more"
    if args.faiss_threads is not None and args.faiss_threads < 1:
        return f"--faiss_threads: found {args.faiss_threads}, expected 1 or more"
    if args.bm25_index_path and not _is_hybrid(args):
        return "--bm25_index_path goes with --retriever_name hybrid; an index of bm25 alone is given by --index_path"
    if fault := language_fault(args.language, args.retriever_name):
        return fault
    if args.retriever_name == "bm25":
        given = [flag for flag in ENCODER_FLAGS if getattr(args, flag) is not None]
        given += [flag for flag in FAISS_FLAGS if getattr(args, flag)]
        return f"--{given[0]} has no meaning with --retriever_name bm25, which has no encoder" if given else None
    encoder = _encoder_name(args)
    if encoder not in PRESETS and not args.retriever_model:
        choices = ", ".join(["bm25", *PRESETS, "hybrid"])
        return f"--retriever_name: found {args.retriever_name!r}, expected one of: {choices}, or --retriever_model too"
    if not args.index_path:
        return f"--retriever_name {args.retriever_name} needs --index_path, a FAISS index made by build_index.py"
    return None


def _is_hybrid(args: argparse.Namespace) -> bool:
    return args.retriever_name.partition(":")[0] == "hybrid"


def _encoder_name(args: argparse.Namespace) -> str:
    if not _is_hybrid(args):
        return args.retriever_name
    name = args.retriever_name.partition(":")[2]
    return name or ("custom" if args.retriever_model else "e5")


def batching_config(args: argparse.Namespace) -> BatchingConfig:
    return BatchingConfig(args.max_batch_size, args.max_wait_ms / 1000, args.max_queue, args.cache_size, args.topk)


def load_retriever(args: argparse.Namespace, corpus: Corpus) -> Retriever:
    """The retriever that the flags describe; ValueError, before anything big is loaded, if it cannot work."""
    if args.retriever_name == "bm25":
        return _load_bm25(args.index_path, corpus, args)
    dense = _load_dense(args, corpus)
    if not _is_hybrid(args):
        return dense
    return HybridRetriever([_load_bm25(args.bm25_index_path, corpus, args), dense])


def _load_bm25(index_path: str | None, corpus: Corpus, args: argparse.Namespace) -> Retriever:
    corpus_path = args.corpus_path
    if index_path is None:
        text = Path(corpus_path).stat().st_size * (3 if corpus_path.endswith(".gz") else 1)
        needed, available = BM25_BUILD_FACTOR * text + corpus_bytes(corpus_path), available_memory()
        logger.info("memory: building the BM25 index %s; %s available", gigabytes(needed), gigabytes(available))
        if needed > available:
            raise ValueError(
                f"building a BM25 index of {corpus_path} takes about {gigabytes(needed)} of memory, but "
                f"{gigabytes(available)} are available; build it once on a larger machine (build_index.py) and give "
                f"--index_path: then it is mapped, and takes little"
            )
    return load_bm25(index_path, corpus, args.language)


def _load_dense(args: argparse.Namespace, corpus: Corpus) -> Retriever:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # FAISS's threads would spin on beside the encoder's
    from local_dense_retriever.dense import load_dense  # torch and FAISS take seconds, which BM25 need not wait

    config = config_from_flags(argparse.Namespace(**{**vars(args), "retriever_name": _encoder_name(args)}))
    return load_dense(
        config,
        corpus,
        index_path=args.index_path,
        corpus_path=args.corpus_path,
        device=args.device,
        fp16=args.fp16,
        max_batch_size=args.max_batch_size,
        faiss_fp16=args.faiss_fp16,
        faiss_gpu=args.faiss_gpu,
        faiss_threads=args.faiss_threads,
    )
