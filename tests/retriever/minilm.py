"""The MiniLM encoder that the set-up installs, and a part of the demo's corpus."""

from __future__ import annotations

import functools

from local_dense_retriever.corpus import read_corpus
from local_dense_retriever.encoders import Encoder
from local_dense_retriever.presets import encoder_config


@functools.cache
def minilm() -> Encoder:
    return Encoder(encoder_config("minilm"), device="cpu", threads=2)


@functools.cache
def passages(count: int = 300) -> list[dict]:
    return read_corpus("data/demo/corpus.jsonl.gz")[:count]


def contents(count: int = 300) -> list[str]:
    return [passage["contents"] for passage in passages(count)]
