"""The rollout's HTTP client of the engines: token ids in, token ids and log-probabilities out.

    async with EngineClient(urls, max_concurrency=256, vocab_size=embedding_size(model_path)) as client:
        generation = await client.generate(input_ids, {"temperature": 1.0, "max_new_tokens": 64})

A trajectory stays with one engine, whose prefix cache holds its beginning (`sleuth.rollout.routing`). The number of
requests under way is bounded for each engine; a trajectory that searches has no request under way, so it does not
count.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import orjson
import tenacity

from sleuth.activity import waiting_for
from sleuth.engine.key import engine_headers
from sleuth.hooks.context import Generation, StopRunError
from sleuth.retries import RetryTeller, with_retries
from sleuth.rollout.routing import Router
from sleuth.sample import check_range

logger = logging.getLogger(__name__)

ATTEMPTS = 4
FIRST_WAIT_SECONDS = 0.5
MAX_WAIT_SECONDS = 8.0
WARNING_SECONDS = 5.0
"""Between two warnings of failed attempts."""
SLACK_SHARE = 16
"""An engine may have 1/16 of its places more under way than another before trajectories leave it."""
TRANSIENT_STATUS = frozenset({429, 500, 502, 503, 504})
# The contract of `generate` needs these parameters, so the caller's cannot change them.
FIXED_SAMPLING_PARAMS = {
    "no_stop_trim": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "n": 1,
}


class EngineError(StopRunError):
    """An engine could not be reached, refused a request, or gave an unusable answer; the message names its URL."""


class EngineUnavailableError(EngineError):
    """An error after which another attempt may succeed."""


class EngineClient:
    """The engines at `urls`, used as one; implements `sleuth.hooks.Engine`.

    `max_concurrency`: the most requests under way to one engine. `vocab_size`: rows of the model's embedding, which can
    be more than the tokenizer's; ids beyond it would kill the server and are never sent. `timeout`: seconds for one
    request. `router_url`: where requests for tokens go instead, SGLang's router in front of all engines, which then
    chooses (`sleuth.engine.router`); everything else goes to the engines themselves.

    All coroutines must run in the event loop of the first call.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        max_concurrency: int,
        vocab_size: int,
        timeout: float = 1800.0,
        attempts: int = ATTEMPTS,
        first_wait: float = FIRST_WAIT_SECONDS,
        router_url: str | None = None,
    ) -> None:
        if not urls:
            raise ValueError("expected at least one engine url, found none: start an engine first")
        if max_concurrency < 1 or vocab_size < 1 or attempts < 1:
            raise ValueError(
                "expected max_concurrency, vocab_size and attempts of at least 1, "
                f"found {max_concurrency}, {vocab_size} and {attempts}"
            )
        self.urls = tuple(url.rstrip("/") for url in urls)
        self.vocab_size = vocab_size
        self._max_concurrency = max_concurrency
        self.patience = 0.0
        """Seconds that a request whose attempts have all failed waits for someone to name other engines (`use`)."""
        self._change = asyncio.Event()
        targets, places = (self.urls, max_concurrency)
        if router_url:
            targets, places = ((router_url.rstrip("/"),), max_concurrency * len(self.urls))
        self._places = {url: asyncio.Semaphore(places) for url in targets}
        self._router = Router(targets, slack=max(1, max_concurrency // SLACK_SHARE))
        self._sent_tokens = self._cached_tokens = 0
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=10.0)
        self._attempts = attempts
        self._wait = tenacity.wait_random_exponential(multiplier=first_wait, max=MAX_WAIT_SECONDS)
        self._tell = RetryTeller(logger, "attempt", WARNING_SECONDS)
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def use(self, urls: Sequence[str]) -> None:
        """From now on send requests to the engines at `urls`; while there are none, requests wait.

        Requests under way go on. Where their engine has ended they fail, and are sent to another one from their
        beginning. Not for a client with a router.
        """
        self.urls = tuple(url.rstrip("/") for url in urls)
        for url in self.urls:
            self._places.setdefault(url, asyncio.Semaphore(self._max_concurrency))
        self._router.use(self.urls)
        self._change.set()
        self._change = asyncio.Event()

    async def generate(self, input_ids: Sequence[int], sampling_params: dict[str, Any]) -> Generation:
        """Continue `input_ids`; log-probabilities are at the sampling temperature, or unscaled if that is 0.

        If a stop string ends the generation, `text` ends right after it, and `ids` hold the whole token in which it
        ends. Raises ValueError for ids for which the model has no embedding, EngineError for errors of the engines.
        """
        self._check_ids(input_ids)
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {**sampling_params, **FIXED_SAMPLING_PARAMS},
            "return_logprob": True,
        }
        url, answer = await self._request_with_retries("generate", body)
        self._sent_tokens += len(input_ids)
        self._cached_tokens += answer["meta_info"].get("cached_tokens") or 0
        return _parse_generation(answer, url)

    async def score(self, input_ids: Sequence[int]) -> list[float]:
        """The log-probability (nats) of each id but the first, given those before it: T - 1 entries for T ids.

        The temperature is always 1: SGLang divides the logits of sampled tokens by the temperature, but never those of
        a prompt. Compare them with the trainer's log-probabilities at temperature 1.
        """
        self._check_ids(input_ids)
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        url, answer = await self._request_with_retries("generate", body)
        entries = answer["meta_info"].get("input_token_logprobs") or []
        ids, log_probs = _parse_log_probs(entries[1:], url, "prompt")
        if ids != list(input_ids[1:]):
            raise EngineError(f"{url}: expected scores of {len(input_ids) - 1} ids, found {len(ids)} of other ids")
        return log_probs

    def take_prompt_tokens(self) -> tuple[int, int]:
        """Tokens given to `generate` since the last call, and how many of them the engines' prefix caches held."""
        taken = self._sent_tokens, self._cached_tokens
        self._sent_tokens = self._cached_tokens = 0
        return taken

    def take_cached_share(self) -> float:
        """The share of the tokens given to `generate` since the last call that the engines' prefix caches held."""
        sent, cached = self.take_prompt_tokens()
        return cached / max(1, sent)

    async def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        if self._session is not None:
            await self._session.close()
        self._session = self._loop = None

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise ValueError("expected at least one input id, found none: the engine needs a prompt")
        check_range(ids, self.vocab_size, "the request")

    async def _request_with_retries(self, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Send a request, a further attempt to another engine if there is one; returns the URL and its answer.

        Where all attempts fail, other engines are waited for: one that has ended may be started again.
        """
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)

        async def attempt() -> tuple[str, dict[str, Any]]:
            while not self.urls:
                with waiting_for("an engine: all have ended"):
                    await self._change.wait()
            with self._router.place(body["input_ids"]) as url, waiting_for(f"engine {url}"):
                async with self._places[url]:
                    return url, await self._send(url, path, data)

        while True:
            change = self._change
            try:
                return await with_retries(
                    attempt,
                    is_transient=lambda error: isinstance(error, EngineUnavailableError),
                    attempts=self._attempts,
                    wait=self._wait,
                    before_sleep=self._tell,
                )
            except EngineUnavailableError:
                if not await self._has_changed(change):
                    raise

    async def _has_changed(self, change: asyncio.Event) -> bool:
        """Whether other engines are named within the patience, or were since `change` was the next change."""
        if not change.is_set() and not self.patience:
            return False
        try:
            with waiting_for("an engine: those that were asked do not answer"):
                async with asyncio.timeout(self.patience):
                    await change.wait()
        except TimeoutError:
            return False
        return True

    async def _send(self, url: str, path: str, data: bytes) -> dict[str, Any]:
        try:
            return await self._request(url, path, data)
        except EngineUnavailableError:
            self._router.failed(url)
            raise

    async def _request(self, url: str, path: str, data: bytes) -> dict[str, Any]:
        session = self._open_session()
        try:
            async with session.post(f"{url}/{path}", data=data) as response:
                answer = await response.read()
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineUnavailableError(
                f"{url}/{path} did not accept a connection ({type(error).__name__}: {error}); is the engine busy?"
            ) from error
        except TimeoutError as error:
            raise EngineError(
                f"{url}/{path} gave no answer within {self._timeout.total:g} s: is it stopped, or overloaded?"
            ) from error
        except aiohttp.ClientError as error:
            raise EngineUnavailableError(
                f"{url}/{path} cannot be reached ({type(error).__name__}: {error}); has the engine died?"
            ) from error
        if response.status in TRANSIENT_STATUS:
            raise EngineUnavailableError(
                f"{url}/{path} answered {response.status}: {_message(answer)} (see the engine's log)"
            )
        if response.status != 200:
            raise EngineError(f"{url}/{path} refused the request with {response.status}: {_message(answer)}")
        return _parse_json(answer, url) if answer else {}

    def _open_session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None:
            # The semaphores bound the number of connections, not aiohttp. The engine closes idle ones after 5 s; we
            # drop them before that, so that none is closed under a request.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
            self._session = aiohttp.ClientSession(
                timeout=self._timeout,
                connector=connector,
                headers={"Content-Type": "application/json", **engine_headers()},
                cookie_jar=aiohttp.DummyCookieJar(),  # an engine sets none; looking for them costs time
            )
            self._loop = loop
        if self._loop is not loop:
            raise RuntimeError(
                "this EngineClient belongs to another event loop: make one per loop, or close() it there"
            )
        return self._session


def embedding_size(model_path: str | Path) -> int:
    """The number of rows of a Hugging Face model's embedding: `vocab_size` of its configuration."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model_path).get_text_config().vocab_size)


def _parse_generation(answer: dict[str, Any], url: str) -> Generation:
    meta = answer["meta_info"]
    reason = (meta["finish_reason"] or {}).get("type")
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"{url}: expected finish_reason stop, length or abort, found {meta['finish_reason']!r}")
    entries = meta.get("output_token_logprobs") or []
    if reason == "abort" and any(entry[0] is None for entry in entries):
        entries = []  # it is not trained on; what an aborted request leaves behind may be incomplete
    ids, log_probs = _parse_log_probs(entries, url, "output")
    if reason != "abort" and ids != answer.get("output_ids", ids):
        raise EngineError(
            f"{url}: the {len(ids)} ids with log-probabilities differ from the {len(answer['output_ids'])} ids"
        )
    versions = meta.get("weight_versions") or []
    version = versions[-1]["version"] if versions else meta.get("weight_version")
    return Generation(ids, log_probs, answer["text"], reason, version)


def _parse_log_probs(entries: list[list[Any]], url: str, what: str) -> tuple[list[int], list[float]]:
    """The ids and log-probabilities in SGLang's entries [log-probability, id, text]."""
    ids, log_probs = [entry[1] for entry in entries], [entry[0] for entry in entries]
    if None in log_probs or not math.isfinite(sum(log_probs)):  # one pass where all is well
        for position, value in enumerate(log_probs):
            if value is None or not math.isfinite(value):
                raise EngineError(
                    f"{url}: expected numbers as log-probabilities, found {value} at {what} token {position} of "
                    f"{len(entries)}: the model computes NaN. Its weights may not be finite (the trainer, and "
                    "tools/convert_hf_to_torch_dist.py, name the tensor), or --sglang-dtype is too narrow for them"
                )
    return ids, log_probs


def _parse_json(answer: bytes, url: str) -> dict[str, Any]:
    try:
        return orjson.loads(answer)
    except orjson.JSONDecodeError:
        pass  # some servers write NaN, which is no JSON but says more than that
    try:
        return json.loads(answer)
    except ValueError:
        raise EngineError(f"{url}: expected JSON, found {answer[:200]!r}") from None


def _message(answer: bytes) -> str:
    """The message in an error answer, without its JSON wrapping."""
    text = answer.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return text[:1000]
