"""Downloads the public wiki-18 corpus and its E5 index, and makes them ready for the server.

    python local_dense_retriever/download.py --save_dir wiki18

The two parts of the index are joined to wiki18/e5_Flat.index (64.6 GB); the corpus is unpacked to wiki18/wiki-18.jsonl
(14.3 GB). An interrupted download, after a lost connection or a kill, continues where it was; files that exist are not
downloaded again. Every file is checked against the SHA-256 that the hub states. For mirrors and private copies set
huggingface_hub's own variables, HF_ENDPOINT and HF_TOKEN.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from local_dense_retriever.hub import Remote, fetch, look_up
from local_dense_retriever.parts import join, joined_bytes, unpack
from local_dense_retriever.sizes import check_disk, gigabytes

logger = logging.getLogger("local_dense_retriever")

UNPACKED_RATIO = 3.2
"""Bytes of a JSONL corpus over those of its gzip; wiki-18's is 3.0."""


@dataclass(frozen=True)
class Source:
    """Files of a data set on the hub, and the one file that is made of them."""

    repository: str
    parts: tuple[str, ...]
    result: str

    @property
    def packed(self) -> bool:
        return self.parts[0].endswith(".gz")


INDEX = Source("PeterJinGo/wiki-18-e5-index", ("part_aa", "part_ab"), "e5_Flat.index")
CORPUS = Source("PeterJinGo/wiki-18-corpus", ("wiki-18.jsonl.gz",), "wiki-18.jsonl")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--save_dir", "--save_path", required=True, type=Path, help="folder for the corpus and the index"
    )
    parser.add_argument("--only", choices=("index", "corpus"), help="fetch only the index, or only the corpus [both]")
    parser.add_argument(
        "--endpoint",
        default=os.environ.get("HF_ENDPOINT") or "https://huggingface.co",
        help="URL of the hub or of a mirror [$HF_ENDPOINT, else https://huggingface.co]",
    )
    parser.add_argument(
        "--sha256",
        action="append",
        default=[],
        metavar="FILE=HEX",
        help="what a file's SHA-256 must be, such as part_aa=0f..., where the server states none; may be repeated",
    )
    parser.add_argument(
        "--delete_parts", action="store_true", help="remove each part once it is joined or unpacked: saves 65 GB"
    )
    parser.add_argument("--retries", type=int, default=8, help="attempts without any progress before giving up [8]")
    args = parser.parse_args(argv)
    if not re.match(r"https?://[^/\s]", args.endpoint):
        parser.error(f"--endpoint: found {args.endpoint!r}, expected a URL such as https://huggingface.co")
    if args.retries < 1:
        parser.error(f"--retries: found {args.retries}, expected 1 or more")
    for pair in args.sha256:
        name, _, digest = pair.partition("=")
        if len(digest) != 64 or not set(digest.lower()) <= set("0123456789abcdef"):
            parser.error(f"--sha256: found {pair!r}, expected FILE=64 hexadecimal digits")
        if name not in (*INDEX.parts, *CORPUS.parts):
            parser.error(f"--sha256: found {name!r}, expected one of: {', '.join((*INDEX.parts, *CORPUS.parts))}")
    return args


def needed_bytes(source: Source, remotes: Sequence[Remote], folder: Path, delete_parts: bool) -> int:
    """Free bytes that downloading, and joining or unpacking, need in addition to what is already in the folder."""
    joined = joined_bytes(folder / source.result)
    total = sum(remote.size for remote in remotes)
    to_fetch = sum(remote.size - remote.bytes_in(folder) for remote in _not_joined(source, remotes, folder))
    if source.packed:
        return to_fetch + int(total * UNPACKED_RATIO)
    if not delete_parts:
        return to_fetch + total - joined
    # The first part becomes the beginning of the result without being copied.
    return to_fetch + total - max(joined, remotes[0].size)


def _not_joined(source: Source, remotes: Sequence[Remote], folder: Path) -> list[Remote]:
    """The parts that are still needed: without those that an interrupted join has already copied completely."""
    joined = 0 if source.packed else joined_bytes(folder / source.result)
    ends = itertools.accumulate(remote.size for remote in remotes)
    return [remote for remote, end in zip(remotes, ends, strict=True) if end > joined]


def obtain(source: Source, args: argparse.Namespace) -> Path:
    """The file made from the source's parts; downloads the parts that are missing.

    Raises ValueError if the server does not have them, the disk is too small or a checksum is wrong.
    """
    target = args.save_dir / source.result
    if target.is_file():
        logger.info("%s is there already (%s)", target, gigabytes(target.stat().st_size))
        return target
    stated = dict(pair.split("=", 1) for pair in args.sha256)
    remotes = [
        look_up(source.repository, name, endpoint=args.endpoint, sha256=stated.get(name), attempts=args.retries)
        for name in source.parts
    ]
    needed = needed_bytes(source, remotes, args.save_dir, args.delete_parts)
    logger.info("%s: %s to download and make", source.result, gigabytes(needed))
    check_disk(args.save_dir, needed, f"{source.result} and what it is made of")
    for remote in _not_joined(source, remotes, args.save_dir):
        fetch(remote, args.save_dir, args.retries)
    if source.packed:
        return unpack(args.save_dir / source.parts[0], target, delete=args.delete_parts)
    return join(source.parts, [remote.size for remote in remotes], target, delete=args.delete_parts)


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    args = parse_args(argv)
    sources = {"index": INDEX, "corpus": CORPUS}
    try:
        args.save_dir.mkdir(parents=True, exist_ok=True)
        for name in [args.only] if args.only else sources:
            logger.info("ready: %s", obtain(sources[name], args))
    except ValueError as error:
        logger.error("%s", error)
        return 1
    except OSError as error:
        logger.error(
            "%s; expected --save_dir to be a folder that can be written to, with space: see to that, then the same "
            "command goes on with what is there",
            error,
        )
        return 1
    except KeyboardInterrupt:
        logger.error("interrupted; the same command goes on with what is there")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
