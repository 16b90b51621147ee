"""Turns texts into embeddings, by any encoder of the Hugging Face hub or in a folder."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import transformers

from local_dense_retriever.presets import EncoderConfig, Pooling

logger = logging.getLogger(__name__)

MIN_BATCH = 8
"""Fewer texts than this are not worth a second thread."""

CPU_BATCH_TEXTS = 16
"""Of a forward on a CPU: enough for its operations to be efficient, few enough for threads to end together."""

CPU_BATCH_TOKENS = 2048
"""Of a forward on a CPU: with more, what one operation writes has left the cache when the next one reads it."""


class Encoder:
    """An encoder on one device. Only one thread at a time may use it."""

    def __init__(
        self,
        config: EncoderConfig,
        *,
        device: str | None = None,
        fp16: bool | None = None,
        batch_size: int = 64,
        threads: int | None = None,
    ) -> None:
        """`device`: None uses a GPU if there is one. `fp16`: None uses half precision on GPUs.

        `batch_size`: texts per forward pass. `threads`: CPU threads, each with batches of its own; None uses as many as
        torch would. The passage model of a pair such as DPR's is loaded when the first passage is encoded. Raises
        ValueError if the model cannot be loaded or does not fit `config`.
        """
        self.config = config
        self.device = _device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device: found {device!r}, but torch sees no GPU here; expected cpu")
        self.dtype = torch.float16 if (self.device.type != "cpu" if fp16 is None else fp16) else torch.float32
        self.batch_size = batch_size
        # Several threads in one forward pass wait for each other at every operation, which on a busy machine is many
        # times slower than one thread. Threads with batches of their own do not wait.
        self._threads = 1 if self.device.type != "cpu" else threads or torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads, "encode", initializer=torch.set_num_threads, initargs=(1,))
        self._queries = _Tower(config.model, config, self.device, self.dtype)
        self._passages = None if config.passage_model else self._queries
        self.dimension = self._queries.dimension

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Embeddings [n, dimension] of queries, float32, in the order of the texts."""
        return self._encode(self._queries, [self.config.query_prefix + text for text in texts])

    def encode_passages(self, contents: Sequence[str]) -> np.ndarray:
        """Embeddings [n, dimension] of passages' contents, float32."""
        if self._passages is None:
            self._passages = _Tower(self.config.passage_model, self.config, self.device, self.dtype)
        prefix = self.config.passage_prefix
        if not self.config.passage_pair:
            return self._encode(self._passages, [prefix + text for text in contents])
        titles, texts = zip(*map(_title_and_text, contents), strict=True) if contents else ((), ())
        return self._encode(self._passages, [prefix + title for title in titles], list(texts))

    def _encode(self, tower: _Tower, texts: list[str], pairs: list[str] | None = None) -> np.ndarray:
        embeddings = np.empty((len(texts), self.dimension), np.float32)
        ids = tower.tokenize(texts, pairs)

        def forward(rows: np.ndarray) -> None:
            embeddings[rows] = tower.forward([ids[row] for row in rows]).cpu().numpy()

        if self.device.type == "cpu":
            share = max(MIN_BATCH, math.ceil(len(texts) / self._threads / 2))  # two each, as some take longer
            batches = _by_length(ids, min(self.batch_size, share, CPU_BATCH_TEXTS), CPU_BATCH_TOKENS)
        else:
            batches = _by_length(ids, self.batch_size, None)
        list(self._pool.map(forward, batches))
        return embeddings

    def describe(self) -> dict[str, Any]:
        """The configuration as a dictionary for JSON, to be kept beside embeddings."""
        return asdict(self.config)


def _device(name: str | None) -> torch.device:
    try:
        return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"--device: found {name!r}, expected cpu, cuda, or one of the GPUs such as cuda:1") from None


def _title_and_text(contents: str) -> tuple[str, str]:
    title, _, text = contents.partition("\n")
    return title.strip('"'), text


def _by_length(ids: Sequence[Sequence[int]], batch_size: int, max_tokens: int | None) -> Iterator[np.ndarray]:
    """Batches of row numbers of texts of similar length, which need little padding; long ones first, to fail early.

    A batch has at most `batch_size` rows and, padded, at most `max_tokens` tokens, but at least one row.
    """
    order = np.argsort([-len(row) for row in ids], kind="stable")
    start = 0
    while start < len(order):
        fitting = max_tokens // len(ids[order[start]]) if max_tokens else batch_size
        rows = order[start : start + max(1, min(batch_size, fitting))]
        yield rows
        start += len(rows)


class _Tower:
    """A tokenizer and a model."""

    def __init__(self, name: str, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        self._device = device
        self._model = _load_model(name, config.pooling, dtype).to(device).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        self._limit = min(config.max_length, self._tokenizer.model_max_length)
        self._pad = self._tokenizer.pad_token_id or 0
        self.dimension = self.forward(self.tokenize(["x"])).shape[1]

    def tokenize(self, texts: list[str], pairs: list[str] | None = None) -> list[list[int]]:
        if not texts:
            return []
        texts, pairs = _encodable(texts), pairs and _encodable(pairs)
        options = {"truncation": True, "max_length": self._limit, "return_attention_mask": False}
        return self._tokenizer(texts, pairs, **options)["input_ids"]

    @torch.inference_mode()
    def forward(self, ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """[B, dimension] float32 for B token lists of any lengths."""
        lengths = torch.tensor([len(row) for row in ids])
        longest = int(lengths.max())
        padded = torch.tensor([[*row, *[self._pad] * (longest - len(row))] for row in ids])
        mask = (torch.arange(longest) < lengths[:, None]).long().to(self._device)
        output = self._model(input_ids=padded.to(self._device), attention_mask=mask)
        vectors = _pool(output, mask, self._config.pooling).float()
        return torch.nn.functional.normalize(vectors, dim=-1) if self._config.normalize else vectors


def _encodable(texts: list[str]) -> list[str]:
    """The texts with ? for lone surrogates, which JSON may hold, but no tokenizer accepts."""
    return [text if text.isascii() else text.encode("utf-8", "replace").decode() for text in texts]


def _pool(output: Any, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """One vector per text, [B, d], from hidden states [B, T, d]; `mask` [B, T] is 1 at the text's tokens."""
    if pooling == "pooler":
        return output.pooler_output
    hidden = output.last_hidden_state
    if pooling == "cls":
        return hidden[:, 0]
    weights = mask.unsqueeze(-1).float()
    return (hidden.float() * weights).sum(1) / weights.sum(1)


def _load_model(name: str, pooling: Pooling, dtype: torch.dtype) -> Any:
    """The model; ValueError if the checkpoint lacks some of its weights, which would be random."""
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        family = _model_class(config)
        model, report = family.from_pretrained(name, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot load the encoder {name!r}: {str(error).splitlines()[0]}; expected a hub name that can be "
            f"downloaded or a folder with config.json, weights and tokenizer (--retriever_model)"
        ) from error
    missing = [key for key in report["missing_keys"] if "position_ids" not in key]
    if pooling != "pooler":
        missing = [key for key in missing if not key.startswith("pooler.")]
    if missing:
        raise ValueError(
            f"the encoder {name!r} lacks {len(missing)} of its {type(model).__name__}'s weights ({missing[0]}, ...), "
            f"which would be random; with missing pooler weights take --pooling mean or cls"
        )
    return model


def _model_class(config: Any) -> Any:
    """AutoModel, except for DPR, whose two models AutoModel does not distinguish."""
    architectures = getattr(config, "architectures", None) or [""]
    if config.model_type == "dpr" and architectures[0].startswith("DPR"):
        return getattr(transformers, architectures[0])
    return transformers.AutoModel
