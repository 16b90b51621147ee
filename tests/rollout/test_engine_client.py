"""The client against the real engine, and against a scripted server for what a healthy engine never does."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from sleuth.engine.server import RESERVED_TOKENS
from sleuth.rollout.engine_client import EngineClient, EngineError, embedding_size
from tests.conftest import CONTEXT, RunningEngine

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 32}
PROMPT = "<think> who wrote hamlet"

Use = Callable[[EngineClient], Awaitable[Any]]


def use(urls: list[str], action: Use, *, vocab_size: int = 512, max_concurrency: int = 64, **options: Any) -> Any:
    """Run `action` with a client in an event loop of its own."""

    async def run() -> Any:
        async with EngineClient(urls, vocab_size=vocab_size, max_concurrency=max_concurrency, **options) as client:
            return await action(client)

    return asyncio.run(run())


def force(token_id: int) -> dict[str, Any]:
    """Parameters that make the model repeat one token."""
    return {**SAMPLING, "max_new_tokens": 6, "logit_bias": {str(token_id): 200.0}}


def token_with(engine: RunningEngine, text: str) -> int:
    """The id of the one token that is exactly `text`."""
    ids = engine.tokenizer.encode(text)
    assert len(ids) == 1, f"the test's vocabulary should have {text!r} as one token"
    return ids[0]


@pytest.mark.engine
class TestRealEngine:
    @pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
    def test_log_probs_equal_hugging_face(self, engine: RunningEngine, temperature: float) -> None:
        prompt = engine.tokenizer.encode(PROMPT)
        params = {**SAMPLING, "temperature": temperature, "ignore_eos": True}
        generation = use([engine.url], lambda client: client.generate(prompt, params))
        expected = engine.log_probs(prompt + generation.ids, temperature)[len(prompt) - 1 :]
        assert len(generation.ids) == len(generation.log_probs) == 32
        assert generation.log_probs == pytest.approx(expected, abs=1e-4)
        assert generation.finish_reason == "length"

    def test_a_trajectory_may_use_the_whole_context(self, engine: RunningEngine) -> None:
        for room in (1, 2, 7):
            prompt = [5] * (CONTEXT - room)
            params = {**SAMPLING, "max_new_tokens": room, "ignore_eos": True}
            generation = use([engine.url], lambda client, prompt=prompt, params=params: client.generate(prompt, params))
            assert len(generation.ids) == room

    def test_log_probs_at_temperature_zero_are_unscaled(self, engine: RunningEngine) -> None:
        prompt = engine.tokenizer.encode(PROMPT)
        generation = use([engine.url], lambda client: client.generate(prompt, {**SAMPLING, "temperature": 0.0}))
        expected = engine.log_probs(prompt + generation.ids)[len(prompt) - 1 :]
        assert generation.log_probs == pytest.approx(expected, abs=1e-4)

    def test_a_restricted_vocabulary_does_not_renormalise(self, engine: RunningEngine) -> None:
        prompt = engine.tokenizer.encode(PROMPT)
        generation = use([engine.url], lambda client: client.generate(prompt, {**SAMPLING, "top_k": 3, "top_p": 0.5}))
        expected = engine.log_probs(prompt + generation.ids)[len(prompt) - 1 :]
        assert generation.log_probs == pytest.approx(expected, abs=1e-4)

    def test_many_at_once(self, engine: RunningEngine) -> None:
        text = engine.tokenizer.encode("the quick brown fox wrote hamlet")
        prompts = [text[: 1 + i % len(text)] + [7 + i] * (i % 9) for i in range(64)]

        async def all_of_them(client: EngineClient) -> list[Any]:
            return await asyncio.gather(*(client.generate(prompt, SAMPLING) for prompt in prompts))

        for prompt, generation in zip(prompts, use([engine.url], all_of_them), strict=True):
            expected = engine.log_probs(prompt + generation.ids)[len(prompt) - 1 :]
            assert generation.log_probs == pytest.approx(expected, abs=1e-4)

    def test_a_stop_string_inside_a_token_keeps_the_whole_token(self, engine: RunningEngine) -> None:
        token = token_with(engine, ">\n\n")
        generation = use([engine.url], lambda client: client.generate([5, 6, 7], {**force(token), "stop": [">"]}))
        assert generation.ids == [token]
        assert generation.text == ">"
        assert generation.finish_reason == "stop"

    def test_a_stop_string_over_two_tokens(self, engine: RunningEngine) -> None:
        token = token_with(engine, " hamlet")
        params = {**force(token), "stop": ["let ham"]}
        generation = use([engine.url], lambda client: client.generate([5, 6, 7], params))
        assert generation.ids == [token, token]
        assert generation.text == " hamlet ham"

    def test_the_end_of_sequence_is_among_the_ids(self, engine: RunningEngine) -> None:
        eos = engine.tokenizer.eos_token_id
        generation = use([engine.url], lambda client: client.generate([5, 6, 7], force(eos)))
        assert generation.ids == [eos]
        assert len(generation.log_probs) == 1
        assert generation.finish_reason == "stop"

    def test_score_is_at_temperature_one(self, engine: RunningEngine) -> None:
        ids = engine.tokenizer.encode("<search> who wrote hamlet </search>")
        scores = use([engine.url], lambda client: client.score(ids))
        assert scores == pytest.approx(engine.log_probs(ids), abs=1e-4)

    def test_too_long_an_input_is_refused(self, engine: RunningEngine) -> None:
        with pytest.raises(EngineError, match=rf"(?s)refused the request with 400.*{CONTEXT + RESERVED_TOKENS}"):
            use([engine.url], lambda client: client.generate([5] * 3000, SAMPLING))
        assert engine.server.is_healthy()

    def test_the_vocabulary_is_the_embeddings(self, engine: RunningEngine) -> None:
        assert embedding_size(engine.model_path) == 512 > len(engine.tokenizer)
        generation = use([engine.url], lambda client: client.generate([511], SAMPLING), vocab_size=512)
        assert generation.ids


@pytest.mark.parametrize("ids", [[5, 512], [-1, 5]])
def test_ids_without_an_embedding_never_leave(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"expected ids in \[0, 512\)"):
        use(["http://127.0.0.1:1"], lambda client: client.generate(ids, SAMPLING))


def test_an_empty_input_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one input id"):
        use(["http://127.0.0.1:1"], lambda client: client.score([]))


def test_a_dead_engine_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(EngineError, match=f"{url}/generate cannot be reached"):
            use([url], lambda client: client.generate([5], SAMPLING), attempts=2, first_wait=0.01)


def test_a_client_needs_engines() -> None:
    with pytest.raises(ValueError, match="at least one engine url"):
        EngineClient([], max_concurrency=1, vocab_size=1)


def test_another_event_loop_is_refused() -> None:
    client = EngineClient(["http://127.0.0.1:1"], max_concurrency=1, vocab_size=512, attempts=1)
    with pytest.raises(EngineError):
        asyncio.run(client.generate([5], SAMPLING))
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(client.generate([5], SAMPLING))


Answer = tuple[int, dict[str, Any] | str]


def answer(log_probs: list[list[Any]], reason: str = "stop", **more: Any) -> Answer:
    meta = {"finish_reason": {"type": reason}, "output_token_logprobs": log_probs, "weight_version": "3"}
    return 200, {"text": "x", "output_ids": [entry[1] for entry in log_probs], "meta_info": meta, **more}


def scripted(answers: list[Answer], action: Use, *, others: tuple[str, ...] = (), **options: Any) -> Any:
    """Run `action` against a server that gives `answers` in turn, the last one for ever, and the engines `others`."""
    highest = under_way = 0

    async def handle(request: web.Request) -> web.Response:
        nonlocal highest, under_way
        under_way += 1
        highest = max(highest, under_way)
        await asyncio.sleep(0.02)
        under_way -= 1
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        return (
            web.Response(text=body, status=status) if isinstance(body, str) else web.json_response(body, status=status)
        )

    async def run() -> Any:
        application = web.Application()
        application.router.add_post("/generate", handle)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        options.setdefault("max_concurrency", 8)
        urls = [*others, f"http://127.0.0.1:{port}"]
        client = EngineClient(urls, vocab_size=512, first_wait=0.01, **options)
        try:
            return await action(client), highest
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(run())


def generate(client: EngineClient) -> Awaitable[Any]:
    return client.generate([5], SAMPLING)


def test_an_answer_that_is_no_json_is_told() -> None:
    with pytest.raises(EngineError, match="expected JSON, found"):
        scripted([(200, "<html>a page of a proxy")], generate)


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf")])
def test_a_missing_log_prob_is_named_by_its_position(value: float | None) -> None:
    with pytest.raises(EngineError, match=r"found .* at output token 1 of 2: the model computes NaN"):
        scripted([answer([[-1.0, 7, None], [value, 8, None]])], generate)


def test_ids_and_log_probs_must_agree() -> None:
    with pytest.raises(EngineError, match="differ from"):
        scripted([answer([[-1.0, 7, None]], output_ids=[7, 8])], generate)


def test_an_unknown_finish_reason_is_an_error() -> None:
    with pytest.raises(EngineError, match="finish_reason"):
        scripted([answer([[-1.0, 7, None]], reason="bored")], generate)


def test_what_an_aborted_request_leaves_may_be_incomplete() -> None:
    generation, _ = scripted([answer([[None, 7, None]], reason="abort")], generate)
    assert generation.finish_reason == "abort"
    assert generation.ids == generation.log_probs == []


@pytest.mark.parametrize("status", [429, 500, 503])
def test_transient_answers_are_tried_again(status: int) -> None:
    generation, _ = scripted([(status, {}), (status, {}), answer([[-1.0, 7, None]])], generate)
    assert generation.ids == [7]
    assert generation.weight_version == "3"


def test_an_engine_that_is_down_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async def in_turn(client: EngineClient) -> list[list[int]]:
        return [(await client.generate([prompt], SAMPLING)).ids for prompt in range(6)]

    caplog.set_level(logging.INFO)
    found, _ = scripted([answer([[-1.0, 7, None]])], in_turn, others=("http://127.0.0.1:1",))
    assert found == [[7]] * 6
    assert sum("127.0.0.1:1/generate cannot be reached" in record.message for record in caplog.records) == 1


def test_the_share_of_cached_tokens_is_counted_since_the_last_call() -> None:
    async def shares(client: EngineClient) -> list[float]:
        await client.generate([5, 6, 7, 8], SAMPLING)
        return [client.take_cached_share(), client.take_cached_share()]

    status, body = answer([[-1.0, 7, None]])
    assert isinstance(body, dict)
    body["meta_info"]["cached_tokens"] = 3
    assert scripted([(status, body)], shares)[0] == [0.75, 0.0]


def test_requests_wait_for_an_engine_and_are_generated_anew_there() -> None:
    """The only one has ended; later there is none, then another one."""

    async def lose(client: EngineClient) -> list[int]:
        (url,) = client.urls
        client.use(["http://127.0.0.1:1"])
        client.patience = 60.0
        request = asyncio.create_task(client.generate([5], SAMPLING))
        late = asyncio.create_task(client.generate([6], SAMPLING))
        await asyncio.sleep(0.3)
        client.use([])
        last = asyncio.create_task(client.generate([7], SAMPLING))
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in (request, late, last))
        client.use([url])
        return [(await task).ids[0] for task in (request, late, last)]

    assert scripted([answer([[-1.0, 7, None]])], lose, attempts=2)[0] == [7, 7, 7]


def test_without_another_engine_patience_ends() -> None:
    async def wait(client: EngineClient) -> None:
        client.patience = 0.05
        await client.generate([5], SAMPLING)

    with pytest.raises(EngineError, match="cannot be reached"):
        use(["http://127.0.0.1:1"], wait, attempts=2, first_wait=0.01)


def test_attempts_are_bounded() -> None:
    with pytest.raises(EngineError, match="answered 503: too busy"):
        scripted([(503, {"error": {"message": "too busy"}})], generate, attempts=3)


def test_one_of_many_failures_is_told_on_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    async def many(client: EngineClient) -> None:
        await asyncio.gather(*(client.generate([5], SAMPLING) for _ in range(12)), return_exceptions=True)

    caplog.set_level(logging.INFO)
    use(["http://127.0.0.1:1"], many, attempts=3, first_wait=0.01)
    told = [record.levelno for record in caplog.records if "cannot be reached (ClientConnector" in record.message]
    assert sorted(told) == [logging.INFO] * 23 + [logging.WARNING]


def test_other_refusals_are_not_tried_again() -> None:
    with pytest.raises(EngineError, match="refused the request with 400: no"):
        scripted([(400, {"error": {"message": "no"}}), answer([[-1.0, 7, None]])], generate)


def test_concurrency_is_bounded() -> None:
    async def many(client: EngineClient) -> int:
        return len(await asyncio.gather(*(client.generate([5], SAMPLING) for _ in range(12))))

    assert scripted([answer([[-1.0, 7, None]])], many, max_concurrency=3) == (12, 3)
