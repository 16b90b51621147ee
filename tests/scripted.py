"""What the hooks' unit tests talk to: a real HTTP server, a second tokenizer, and a check of traces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sleuth.hooks.testing import ScriptedEngine
from sleuth.sample import Sample


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
        assert {"</search>", "</answer>"} <= set(params["stop"])
    of_model = [
        mask for segment in trace.segments if segment.source == "model" for mask in [1] * (segment.end - segment.start)
    ]
    assert sum(trace.loss_mask) == len(of_model)
    assert all((value == 0.0) == (mask == 0) for value, mask in zip(trace.log_probs, trace.loss_mask, strict=True))
