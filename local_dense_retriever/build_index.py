"""Builds a search index of a corpus: embeddings and FAISS indices, whose recall it measures; or a BM25 index.

    python local_dense_retriever/build_index.py --corpus_path corpus.jsonl --save_dir index --retriever_name e5
    python local_dense_retriever/build_index.py --corpus_path corpus.jsonl --save_dir index --retriever_name e5 \\
        --index_type flat ivf_pq hnsw
    python local_dense_retriever/build_index.py --corpus_path corpus.jsonl --save_dir bm25 --retriever_name bm25

The embeddings are kept in the folder (2 bytes per number), so that another --index_type needs no encoding, and a killed
run continues where it was. Several machines or GPUs can share the work: each runs one --shard (1/4 to 4/4) into the
same folder; then a run without --shard makes the index.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from local_dense_retriever.corpus import Corpus, open_corpus
from local_dense_retriever.dense import read_description
from local_dense_retriever.embeddings import Embeddings, Origin, Shard, write_embeddings
from local_dense_retriever.encoders import Encoder
from local_dense_retriever.indices import INDEX_TYPES, IndexOptions, Recall, build_and_measure, check_options
from local_dense_retriever.presets import PRESETS, EncoderConfig, add_encoder_flags, config_from_flags
from local_dense_retriever.retrievers import Bm25Retriever
from local_dense_retriever.sizes import gigabytes
from local_dense_retriever.words import DEFAULT_LANGUAGE, language_fault

logger = logging.getLogger("local_dense_retriever")

QUERY_WORDS = 16


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus_path", required=True, help="passages, a .jsonl or .jsonl.gz file")
    parser.add_argument("--save_dir", required=True, type=Path, help="folder for embeddings and indices")
    parser.add_argument(
        "--retriever_name",
        default="e5",
        help=f"bm25, an encoder ({', '.join(PRESETS)}), or any name with --retriever_model [e5]",
    )
    parser.add_argument(
        "--language",
        help=f"language of bm25's stemmer and stop words, such as german; none uses neither [{DEFAULT_LANGUAGE}]",
    )
    parser.add_argument("--index_type", nargs="+", default=["flat"], choices=INDEX_TYPES, help="kinds of index [flat]")
    parser.add_argument("--shard", type=_shard, help="encode one part only, such as 2/4, and make no index")
    parser.add_argument("--batch_size", type=int, default=64, help="most passages encoded together [64]")
    parser.add_argument("--threads", type=int, help="CPU threads that encode [as many as torch uses]")
    add_encoder_flags(parser)
    group = parser.add_argument_group("indices")
    defaults = IndexOptions()
    group.add_argument("--nlist", type=int, help="IVF: number of clusters [4 sqrt(n), fewer for small corpora]")
    group.add_argument("--nprobe", type=int, help="IVF: clusters searched for a query [a sixteenth, at least 16]")
    group.add_argument("--pq_bytes", type=int, help="IVF-PQ: bytes of a vector's code [a quarter of its dimension]")
    meanings = {
        "ef_construction": "HNSW: candidates considered when a vector is linked",
        "ef_search": "HNSW: candidates considered in a search",
        "seed": "seed of the choice of vectors and queries",
    }
    for name, text in meanings.items():
        default = getattr(defaults, name)
        group.add_argument(f"--{name}", type=int, default=default, help=f"{text} [{default}]")
    group.add_argument("--queries_path", type=Path, help="queries to measure recall with, one per line [from passages]")
    group.add_argument("--recall_queries", type=int, default=200, help="how many queries to measure recall with [200]")
    args = parser.parse_args(argv)
    counts = ("batch_size", "recall_queries", "threads", "nlist", "nprobe", "pq_bytes", "ef_construction", "ef_search")
    for flag in counts:
        if (value := getattr(args, flag)) is not None and value < 1:
            parser.error(f"--{flag}: found {value}, expected 1 or more")
    if args.seed < 0:
        parser.error(f"--seed: found {args.seed}, expected 0 or more")
    if fault := language_fault(args.language, args.retriever_name):
        parser.error(fault)
    return args


def _shard(text: str) -> Shard:
    try:
        return Shard.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None  # which argparse shows


def recall_queries(corpus: Corpus, path: Path | None, count: int, seed: int) -> list[str]:
    """`count` lines of the file, or the beginnings of as many random passages' texts, as queries.

    A line ends at \\n alone: other separators of Unicode are text.
    """
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_bytes().decode("utf-8-sig").split("\n") if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"--queries_path: {path} cannot be read ({error}); expected one query a line, in UTF-8"
            ) from None
        if not lines:
            raise ValueError(f"--queries_path: {path} is empty; expected one query a line")
        return lines[:count]
    chosen = np.random.default_rng(seed).choice(len(corpus), min(count, len(corpus)), replace=False)
    return [_beginning(corpus[int(number)]["contents"]) for number in chosen]


def _beginning(contents: str) -> str:
    title, _, text = contents.partition("\n")
    return " ".join((text or title).split()[:QUERY_WORDS]) or title


def print_table(reports: Sequence[Recall], passages: int) -> None:
    """Print how the indices compare with exact search."""
    table = Table("index", "size", "built in", "ms/query", title=f"{passages:,} passages; recall beside exact search")
    for k in reports[0].recall:
        table.add_column(f"recall@{k}", justify="right")
    for report in reports:
        found = [f"{value:.3f}" for value in report.recall.values()]
        table.add_row(
            report.index_type, gigabytes(report.size), f"{report.build_s:.1f} s", f"{report.query_ms:.2f}", *found
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def up_to_date(
    folder: Path, index_types: Sequence[str], corpus: Corpus, config: EncoderConfig, options: IndexOptions
) -> bool:
    """Whether the folder already has all these indices, for this corpus, encoder and options."""
    wanted = (corpus.fingerprint, asdict(config), asdict(options))
    kept = [read_description(folder / f"{name}.index") for name in index_types]
    files = all((folder / f"{name}.index").is_file() for name in index_types)
    return files and all(d and (d["corpus"], d["encoder"], d.get("options")) == wanted for d in kept)


def build_dense(args: argparse.Namespace, corpus: Corpus) -> None:
    config = config_from_flags(args)
    names = ("nlist", "nprobe", "pq_bytes", "ef_construction", "ef_search", "seed")
    options = IndexOptions(**{name: getattr(args, name) for name in names})
    if args.shard is None and up_to_date(args.save_dir, args.index_type, corpus, config, options):
        logger.info("%s has these indices already, of this corpus and encoder and with these options", args.save_dir)
        return
    texts = recall_queries(corpus, args.queries_path, args.recall_queries, args.seed)
    encoder = Encoder(config, device=args.device, fp16=args.fp16, batch_size=args.batch_size, threads=args.threads)
    for index_type in args.index_type:  # before hours of encoding
        check_options(index_type, len(corpus), encoder.dimension, options)
    shard = args.shard or _whole(args.save_dir)
    if shard is not None:
        write_embeddings(corpus, encoder, args.save_dir, shard)
    if args.shard is not None:
        logger.info("--shard %d/%d is done; once all are, leave --shard out", args.shard.number, args.shard.count)
        return
    embeddings = Embeddings(args.save_dir)
    Origin.of(corpus, encoder).check(embeddings.origin, str(args.save_dir))
    queries = encoder.encode_queries(texts)
    print_table(build_and_measure(embeddings, args.index_type, args.save_dir, queries, options), len(corpus))


def _whole(folder: Path) -> Shard | None:
    """The one shard of a run without --shard; None where the folder has embeddings in several shards."""
    several = [path for path in folder.glob("embeddings-*-of-*.json") if not path.stem.endswith("-of-00001")]
    return None if several else Shard()


def build_bm25(args: argparse.Namespace, corpus: Corpus) -> None:
    started = time.monotonic()
    language = args.language or DEFAULT_LANGUAGE
    Bm25Retriever.build(corpus, language=language, show_progress=True).save(args.save_dir, corpus.fingerprint)
    logger.info("BM25 index of %d passages in %s after %.1f s", len(corpus), args.save_dir, time.monotonic() - started)


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    args = parse_args(argv)
    try:
        corpus = open_corpus(args.corpus_path)
        (build_bm25 if args.retriever_name == "bm25" else build_dense)(args, corpus)
    except ValueError as error:
        logger.error("%s", error)
        return 1
    except OSError as error:
        logger.error(
            "%s; expected a corpus that can be read, and a folder --save_dir with space that can be written to: see to "
            "that, then the same command goes on with what is done",
            error,
        )
        return 1
    except KeyboardInterrupt:
        logger.error("interrupted; the same command goes on with what is done")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
