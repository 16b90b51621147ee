"""What the hooks' unit tests talk to: an engine that follows a script, a real HTTP server, a second tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sleuth.rollout.context import Generation
from sleuth.sample import Sample


class ScriptedEngine:
    """Says its turns one after the other, as an engine would: whole tokens, stop strings, a token limit.

    A turn is text, generated up to the token in which the first stop string ends, or a finished Generation.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, turns: Sequence[str | Generation]) -> None:
        self._tokenizer = tokenizer
        self._turns = list(turns)
        self.requests: list[tuple[list[int], dict[str, Any]]] = []

    async def generate(self, input_ids: Sequence[int], sampling_params: dict[str, Any]) -> Generation:
        self.requests.append((list(input_ids), dict(sampling_params)))
        turn = self._turns.pop(0)
        if isinstance(turn, Generation):
            return turn
        ids, text = self._generate(turn, sampling_params["stop"])
        limit = sampling_params["max_new_tokens"]
        if len(ids) >= limit:  # SGLang looks at the limit before the stop strings
            return Generation(ids[:limit], _log_probs(limit), self._tokenizer.decode(ids[:limit]), "length", "1")
        return Generation(ids, _log_probs(len(ids)), text, "stop", "1")

    def _generate(self, turn: str, stop: Sequence[str]) -> tuple[list[int], str]:
        ids: list[int] = []
        for token in self._tokenizer.encode(turn, add_special_tokens=False):
            ids.append(token)
            text = self._tokenizer.decode(ids)
            ends = [text.index(string) + len(string) for string in stop if string in text]
            if ends:
                return ids, text[: min(ends)]
        return ids, turn


def _log_probs(count: int) -> list[float]:
    return [-0.01 * (position + 1) for position in range(count)]


@asynccontextmanager
async def serving(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], path: str = "/"
) -> AsyncIterator[str]:
    """A server on a free port of 127.0.0.1 that answers every request with `handler`; yields its URL with `path`."""
    application = web.Application(client_max_size=64 * 1024 * 1024)
    application.router.add_route("*", "/{tail:.*}", handler)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}{path}"
    finally:
        await runner.cleanup()


def make_plain_bpe_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in which `>` never merges with anything, unlike Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[<>/]|\s+|\w+|[^\w\s<>/]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["<think> search answer information </search> capital of France"] * 50, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>")


def check_trace(sample: Sample, engine: ScriptedEngine) -> None:
    """Every prefix the engine saw is a prefix of what is trained on; 1 exactly on the model's tokens."""
    trace = sample.trace
    assert len(trace.response_ids) == len(trace.loss_mask) == len(trace.log_probs)
    for ids, params in engine.requests:
        assert ids == trace.token_ids[: len(ids)]
        assert params["no_stop_trim"] is True
        assert {"</search>", "</answer>"} <= set(params["stop"])
    of_model = [
        mask for segment in trace.segments if segment.source == "model" for mask in [1] * (segment.end - segment.start)
    ]
    assert sum(trace.loss_mask) == len(of_model)
    assert all((value == 0.0) == (mask == 0) for value, mask in zip(trace.log_probs, trace.loss_mask, strict=True))
