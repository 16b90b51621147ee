"""The search conversation: a model thinks, searches, reads, and answers.

A generate hook and a reward hook for the tag protocol `<think> <search> <information> <answer>`:

    --custom-generate-function-path generate_with_search.generate
    --custom-rm-path generate_with_search.reward_func

Token ids are the truth: every engine request carries the ids so far, every observation is encoded
on its own and appended, and nothing is ever re-tokenized. What the format is worth is decided in
`qa_em_format.py`; how passages are fetched, in `local_search_server.py` and `google_search_server.py`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator
from transformers import PreTrainedTokenizerBase

from google_search_server import google_search
from local_search_server import local_search
from qa_em_format import iter_actions, score_response
from sleuth.rollout.context import Generation, rollout_context
from sleuth.sample import Sample, SampleStatus, Source, StopReason
from sleuth.search import SearchError, SearchService, decode, encode, format_observation, with_search_retries

SEARCH_R1_CONFIGS: dict[str, Any] = {
    # The conversation
    "max_turns": 2,  # search rounds; one more generation follows, for the answer
    "topk": 3,  # passages a search
    "max_observation_tokens": 500,
    "max_invalid_actions": 2,  # corrected; one more ends the trajectory
    "return_logprob": True,
    # The search
    "search_backend": "local",  # local, google, or your own: "module.function" of async def search(query, topk)
    "search_concurrency": 256,
    "search_timeout": 60.0,  # seconds an attempt
    "search_retries": 9,  # waits of 36 to 72 s in all: a server that is started again is back by then
    "search_cache_size": 0,  # results kept; 0: none
    "max_search_failure_rate": 0.5,  # of the last searches; above it the step stops
    "local": {"search_url": "http://127.0.0.1:8000/retrieve", "proxy": None},
    "google": {"api_key": "env:SERPER_API_KEY", "snippet_only": True, "proxy": None},
    # The reward
    "score": 1.0,
    "format_score": 0.2,
    "retrieval_score": 0.0,
    "final_format_score": 0.0,
    "answer_metric": "em",  # or f1: part of the score for part of the words
    "keep_numbers": False,  # True: "3.5" is not "35"
}
"""Defaults; `--custom-config-path` overrides any of them under `search_r1:`. Keys come from the environment only."""

STOP = ("</search>", "</answer>")
CORRECTION = (
    "\nThat was no valid action. A query goes between <search> and </search>, "
    "a final answer between <answer> and </answer>.\n"
)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


def _http_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and not re.search(r"\s", url) and parts.port != 0:
            return url
    except ValueError:  # of a port or an IPv6 address
        pass
    raise ValueError("expected a URL such as http://127.0.0.1:8000/retrieve")


class LocalConfig(_Section):
    """A retrieval server."""

    search_url: Annotated[str, AfterValidator(_http_url)]
    proxy: Annotated[str, AfterValidator(_http_url)] | None


class GoogleConfig(_Section):
    """Google through serper.dev. The key is named, never held."""

    api_key: str
    snippet_only: bool
    proxy: Annotated[str, AfterValidator(_http_url)] | None

    @field_validator("api_key")
    @classmethod
    def _named(cls, value: str) -> str:
        if not re.fullmatch(r"env:[A-Za-z_][A-Za-z0-9_]*", value):
            raise ValueError("a key belongs in an environment variable: give its name, as in env:SERPER_API_KEY")
        return value

    def key(self) -> str:
        """The key itself; ValueError if the environment does not hold it."""
        name = self.api_key.removeprefix("env:")
        key = os.environ.get(name, "").strip()  # a file's last line end would break the header
        if not key:
            raise ValueError(
                f"search_backend google needs a serper.dev key in {name}; export {name}=... and start again"
            )
        return key


class SearchConfig(_Section):
    """The typed view of SEARCH_R1_CONFIGS and what overrides it."""

    max_turns: int = Field(ge=0)
    topk: int = Field(ge=1, le=100)
    max_observation_tokens: int = Field(ge=16)
    max_invalid_actions: int = Field(ge=0)
    return_logprob: Literal[True]
    search_backend: str
    search_concurrency: int = Field(ge=1)
    search_timeout: float = Field(gt=0)
    search_retries: int = Field(ge=0)
    search_cache_size: int = Field(ge=0)
    max_search_failure_rate: float = Field(ge=0, le=1)
    local: LocalConfig
    google: GoogleConfig
    score: float
    format_score: float
    retrieval_score: float
    final_format_score: float
    answer_metric: Literal["em", "f1"]
    keep_numbers: bool

    @field_validator("search_backend")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ("local", "google"):
            _load_backend(value)
        return value


def search_config(args: Any) -> SearchConfig:
    """SEARCH_R1_CONFIGS, overridden by `args.custom_config["search_r1"]`; ValueError says what is wrong."""
    overrides = (getattr(args, "custom_config", None) or {}).get("search_r1") or {}
    written = repr((SEARCH_R1_CONFIGS, overrides))  # both can be changed in place
    if written not in _configs:
        _configs.clear()  # a run has one
        try:
            _configs[written] = SearchConfig.model_validate(_merge(SEARCH_R1_CONFIGS, overrides))
        except ValidationError as errors:
            raise ValueError("search_r1: " + "; ".join(map(_explain, errors.errors()))) from None
    return _configs[written]


_configs: dict[str, SearchConfig] = {}
"""The last one: validation costs more than a turn's bookkeeping."""


def check_args(args: Any) -> None:
    """ValueError if these hooks could not run with these arguments; called before anything starts."""
    _backend(search_config(args))


def _merge(defaults: Mapping[str, Any], overrides: Any) -> Any:
    if not isinstance(overrides, Mapping):
        return overrides
    return {
        **defaults,
        **{k: _merge(defaults[k], v) if isinstance(defaults.get(k), Mapping) else v for k, v in overrides.items()},
    }


def _explain(error: Any) -> str:
    path = [str(part) for part in error["loc"]]
    if error["type"] != "extra_forbidden":
        message = error["msg"].removeprefix("Value error, ")
        if error["type"].endswith("_type") and "valid dictionary" in message:
            message = "expected a section of keys and values"
        may_be_secret = path[:1] == ["google"] or path[-1:] == ["proxy"]
        found = "" if may_be_secret or path == ["search_backend"] else f", found {error['input']!r:.80}"
        return f"{'.'.join(path) or 'the section'}: {message}{found}"
    known = SEARCH_R1_CONFIGS if len(path) == 1 else SEARCH_R1_CONFIGS[path[0]]
    near = get_close_matches(path[-1], known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"unknown key {'.'.join(path)}; {hint}known are {', '.join(known)}"


# --- Searching ---


def _load_backend(path: str) -> Callable[..., Awaitable[Sequence[Any]]]:
    """The user's own `async def search(query, topk)`, named as "module.function"."""
    module_name, _, name = path.rpartition(".")
    choices = "expected local, google, or module.function of your own async def search(query, topk)"
    if not module_name or not name or path.startswith("."):
        raise ValueError(f"no search backend is named {path!r}; {choices}")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot load the search backend {path!r} ({error}); {choices}") from None
    except Exception as error:  # whatever the user's module does while it is imported
        raise ValueError(
            f"found the search backend's module {module_name}, but it fails to import: {type(error).__name__}: {error}"
        ) from error
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"found {path!r} as search backend, which is not an async function; {choices}")
    try:
        inspect.signature(function).bind("query", 1)
    except TypeError as error:
        raise ValueError(f"found {path}{inspect.signature(function)} as search backend ({error}); {choices}") from None
    return function


def _backend(config: SearchConfig) -> Callable[[str], Awaitable[Sequence[Any]]]:
    """What searches for one query, with its timeout and retries."""
    topk, timeout, retries = config.topk, config.search_timeout, config.search_retries
    if config.search_backend == "local":
        local = config.local
        return lambda query: local_search(local.search_url, query, topk, timeout, local.proxy, retries=retries)
    if config.search_backend == "google":
        google, key = config.google, config.google.key()
        return lambda query: google_search(
            key, query, topk, timeout, google.proxy, google.snippet_only, retries=retries
        )
    function = _load_backend(config.search_backend)

    async def attempt(query: str) -> Sequence[Any]:
        try:
            async with asyncio.timeout(timeout):
                return await function(query, topk)
        except SearchError:
            raise
        except TimeoutError:
            message = f"{config.search_backend}: no answer within {timeout} s"
            raise SearchError(message, "timeout", retryable=True) from None
        except Exception as error:
            message = f"{config.search_backend}: {type(error).__name__}: {error}"
            raise SearchError(message, "backend", retryable=True) from error

    return lambda query: with_search_retries(lambda: attempt(query), retries)


_services: dict[tuple[asyncio.AbstractEventLoop, SearchConfig], SearchService] = {}


def _service(config: SearchConfig) -> SearchService:
    """The one service of this configuration in this event loop."""
    key = asyncio.get_running_loop(), config
    if key not in _services:
        for ended in [other for other in _services if other[0].is_closed()]:
            del _services[ended]
        _services[key] = SearchService(
            _backend(config),
            concurrency=config.search_concurrency,
            cache_size=config.search_cache_size,
            max_failure_rate=config.max_search_failure_rate,
        )
    return _services[key]


# --- The conversation ---


def postprocess_predictions(text: str) -> tuple[str | None, str]:
    """The action of one turn, `search` or `answer`, and its content; (None, "") if there is no valid one.

    The first closed `<search>` or `<answer>` outside of `<think>` acts. Linear in the text's length.
    """
    action = next(iter_actions(text), None)
    if action is None or not action.well_formed:
        return None, ""
    return action.name, action.content


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Hold one conversation; the sample ends with a status and a reason.

    Evaluation has the same budgets. Raises ValueError on a configuration or log-probabilities that are wrong,
    SearchUnavailableError when the search backend must be taken for down.
    """
    if sample.trace.response_ids:
        raise ValueError(
            f"sample {sample.index} has {len(sample.trace.response_ids)} response tokens already: "
            "partial rollouts are not supported; start from the prompt"
        )
    conversation = Conversation(
        search_config(args), sample, sampling_params, getattr(args, "rollout_max_context_len", None)
    )
    try:
        return await conversation.run()
    finally:
        sample.rollout_metrics.update(conversation.metrics())


class Conversation:
    """The state of one trajectory between turns."""

    def __init__(
        self, config: SearchConfig, sample: Sample, sampling_params: dict[str, Any], max_context: int | None
    ) -> None:
        context = rollout_context()
        self.config, self.sample, self.trace = config, sample, sample.trace
        self.engine, self.tokenizer = context.engine, context.tokenizer
        self.max_context = max_context or self.tokenizer.model_max_length
        self.params = {**sampling_params, "stop": _stop_strings(sampling_params.get("stop")), "no_stop_trim": True}
        self.turns = self.searches = self.invalid_actions = 0
        self.generation_seconds = self.search_seconds = 0.0

    async def run(self) -> Sample:
        """Turns until the sample is finished: generate, act, and let the environment answer."""
        finish, config = self.sample.finish, self.config
        while True:
            if self._room() < 1:
                return finish(SampleStatus.TRUNCATED, StopReason.CONTEXT_LIMIT)
            generation, max_new_tokens = await self._turn()
            if generation.finish_reason == "abort":
                return finish(SampleStatus.ABORTED, StopReason.ENGINE_ABORT, "the engine aborted a request")
            action, content = postprocess_predictions(self._turn_text(generation))
            if action == "answer":
                return finish(SampleStatus.COMPLETED, StopReason.ANSWERED)
            if action is None and generation.finish_reason == "length":
                full = max_new_tokens == self.params["max_new_tokens"]
                return finish(SampleStatus.TRUNCATED, StopReason.RESPONSE_LIMIT if full else StopReason.CONTEXT_LIMIT)
            if self.searches == config.max_turns:
                return finish(SampleStatus.TRUNCATED, StopReason.TURN_LIMIT)
            if action is None and self.invalid_actions == config.max_invalid_actions:
                self.invalid_actions += 1
                return finish(SampleStatus.TRUNCATED, StopReason.INVALID_ACTION_LIMIT)
            try:
                source, ids = await self._observe(action, content)
            except SearchError as error:
                return finish(SampleStatus.FAILED, StopReason.SEARCH_FAILED, str(error))
            if len(ids) >= self._room():
                return finish(SampleStatus.TRUNCATED, StopReason.CONTEXT_LIMIT)
            self.trace.append_observation(ids, source)

    def _room(self) -> int:
        return self.max_context - len(self.trace)

    async def _turn(self) -> tuple[Generation, int]:
        """One generation, appended to the trace, and how many tokens it was allowed."""
        max_new_tokens = min(self.params["max_new_tokens"], self._room())
        start = time.perf_counter()
        params = {**self.params, "max_new_tokens": max_new_tokens}
        generation = await self.engine.generate(self.trace.token_ids, params)
        self.generation_seconds += time.perf_counter() - start
        self.trace.append_model(generation.ids, generation.log_probs)
        self.sample.weight_version = generation.weight_version
        self.turns += 1
        return generation, max_new_tokens

    def _turn_text(self, generation: Generation) -> str:
        opening = think_opened_by_prompt(self.trace.prompt_ids, self.tokenizer) if self.turns == 1 else ""
        return opening + decode(generation.ids, self.tokenizer)

    async def _observe(self, action: str | None, content: str) -> tuple[Source, list[int]]:
        """What the environment answers to a search or to an invalid action, and under which name."""
        if action is None:
            self.invalid_actions += 1
            return "correction", encode(CORRECTION, self.tokenizer).ids
        self.searches += 1
        start = time.perf_counter()
        try:
            passages = await _service(self.config).search(content)
        finally:
            self.search_seconds += time.perf_counter() - start
        return "observation", format_observation(passages, self.tokenizer, self.config.max_observation_tokens)

    def metrics(self) -> dict[str, float]:
        return {
            "turns": self.turns,
            "searches": self.searches,
            "invalid_actions": self.invalid_actions,
            "observation_length": sum(s.end - s.start for s in self.trace.segments if s.source == "observation"),
            "generation_seconds": self.generation_seconds,
            "search_seconds": self.search_seconds,
        }


def _stop_strings(stop: str | Sequence[str] | None) -> list[str]:
    """The caller's stop strings and the closing tags, each once."""
    return list(dict.fromkeys([*([stop] if isinstance(stop, str) else stop or []), *STOP]))


def think_opened_by_prompt(prompt_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """`<think>` where the prompt ends with it, as some chat templates do; it belongs to the first turn then."""
    return _think_opened_by(tuple(prompt_ids[-8:]), tokenizer)


@lru_cache(maxsize=1024)
def _think_opened_by(prompt_end: tuple[int, ...], tokenizer: PreTrainedTokenizerBase) -> str:
    return "<think>" if decode(prompt_end, tokenizer).rstrip().endswith("<think>") else ""


# --- The reward ---


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """Format-aware exact match, as `reward`, and what it is made of; why goes to the sample's metadata."""
    config, tokenizer = search_config(args), rollout_context().tokenizer
    result = score_response(
        text_segments(sample, tokenizer),
        sample.label,
        score=config.score,
        format_score=config.format_score,
        retrieval_score=config.retrieval_score,
        final_format_score=config.final_format_score,
        metric=config.answer_metric,
        keep_numbers=config.keep_numbers,
        end_of_turn=[tokenizer.eos_token] if isinstance(tokenizer.eos_token, str) else [],
    )
    sample.metadata |= {"answer": result.answer, "invalid_reason": result.invalid_reason}
    return {
        "reward": result.reward,
        "exact_match": float(result.exact_match),
        "f1": result.f1,
        "valid_format": float(result.valid_format),
        "retrieval_hit": float(result.retrieval_hit),
        "answered": float(result.answer is not None),
    }


def text_segments(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """The response as `(source, text)`, one for each segment of the trace."""
    ids, segments = sample.trace.response_ids, sample.trace.segments
    texts: list[tuple[str, str]] = [(s.source, decode(ids[s.start : s.end], tokenizer)) for s in segments]
    if texts and (opening := think_opened_by_prompt(sample.trace.prompt_ids, tokenizer)):
        texts[0] = (texts[0][0], opening + texts[0][1])
    return texts
