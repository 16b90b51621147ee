"""The search conversation: a model thinks, searches, reads, and answers.

A generate hook and a reward hook for the tag protocol `<think> <search> <information> <answer>`:

    --custom-generate-function-path generate_with_search.generate
    --custom-rm-path generate_with_search.reward_func

Token ids are the truth: every engine request carries the ids so far, every observation is encoded
on its own and appended, and nothing is ever re-tokenized. `qa_em_format.py` decides what answer and format are worth;
`local_search_server.py` and `google_search_server.py` fetch passages.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from transformers import PreTrainedTokenizerBase

from deepseek_search import DeepSeekSettings
from google_search_server import GoogleSettings
from local_search_server import START_SERVER, LocalSettings
from qa_em_format import iter_actions, parse_golden_answers, score_response
from searxng_search import SearxngSettings
from sleuth.hooks import (
    Conversation,
    Sample,
    SampleStatus,
    Settings,
    StopReason,
    decode,
    load_hook,
    rollout_context,
)
from sleuth.search import (
    Backend,
    Passage,
    QueryError,
    SearchError,
    SearchService,
    ask_test_question,
    format_observation,
    guarded_backend,
    shared_service,
)
from sleuth.search.web import WebSettings, read_env_file
from wikipedia_search import WikipediaSettings
from zhihu_search import ZhihuSettings

SEARCH_R1_CONFIGS: dict[str, Any] = {
    "max_turns": 2,  # search rounds; one more generation follows, for the answer
    "topk": 3,  # passages per search
    "search_concurrency": 256,
    # local, google, wikipedia, deepseek, zhihu, searxng, or "module.function" of your async def search(query, topk)
    "search_backend": "local",
    "local": {"search_url": "http://127.0.0.1:8000/retrieve", "proxy": None},
    "google": {"api_key": "env:SERPER_API_KEY", "snippet_only": True, "proxy": None},  # the key's name, never the key
    # "wikipedia": {...} and the other web backends: the keys and defaults of a section stand in <name>_search.py
    "return_logprob": True,
    "format_score": 0.2,
}
"""The settings that people change most. The section `search_r1:` of a --custom-config-path file outranks them, and
--search-backend and --search-url outrank both. `SearchSettings` has the types of these keys, and further keys."""

PROMPT_TEMPLATE = "tags"
"""The --prompt-template that explains this protocol: a run whose prompts are bare questions is told to take it."""
STOP = ("</search>", "</answer>")
AnyWebSettings = WikipediaSettings | DeepSeekSettings | ZhihuSettings | SearxngSettings
CORRECTION = (
    "\nThat was no valid action. A query goes between <search> and </search>, "
    "a final answer between <answer> and </answer>.\n"
)
REFUSED = "\nThat query was refused. A short question goes between <search> and </search>.\n"
BUILT_IN = ("local", "google", "wikipedia", "deepseek", "zhihu", "searxng")


def _known_backend(value: str) -> str:
    if value in BUILT_IN:
        return value
    choices = f"expected {', '.join(BUILT_IN)}, or module.function of your own async def search(query, topk)"
    if not re.fullmatch(r"\w+(\.\w+)+", value):
        raise ValueError(f"no search backend is named {value!r}; {choices}")
    try:
        load_hook(value, "search")
    except ValueError as error:
        raise ValueError(f"{error}; {choices}") from None
    return value


class SearchSettings(
    Settings, section="search_r1", flags={"search_backend": "search_backend", "search_url": "local.search_url"}
):
    """The section `search_r1`. Keys without a default here have it in SEARCH_R1_CONFIGS."""

    max_turns: int = Field(ge=0)
    topk: int = Field(ge=1, le=100)
    search_concurrency: int = Field(ge=1)
    search_backend: Annotated[str, AfterValidator(_known_backend)]
    local: LocalSettings
    google: GoogleSettings
    wikipedia: WikipediaSettings = WikipediaSettings()
    deepseek: DeepSeekSettings = DeepSeekSettings()
    zhihu: ZhihuSettings = ZhihuSettings()
    searxng: SearxngSettings = SearxngSettings()
    return_logprob: Literal[True]
    max_observation_tokens: int = Field(500, ge=16)
    max_invalid_actions: int = Field(2, ge=0)  # corrected; one more ends the trajectory
    trajectory_timeout: float | None = Field(None, gt=0)  # seconds
    search_timeout: float = Field(60.0, gt=0)  # seconds per attempt
    search_retries: int = Field(9, ge=0)  # waits of 36 to 72 s in all: a restarted server is back by then
    search_cache_size: int = Field(0, ge=0)  # how many results are kept
    max_search_failure_rate: float = Field(0.5, ge=0, le=1)  # of the last searches; above it the run stops
    score: float = 1.0
    format_score: float
    # slime's example gives 0.1 for both. Here they are off: short answers such as years stand in many passages by
    # chance, and an answer of broken format would be worth more than none, so both pay where nothing was learned.
    retrieval_score: float = 0.0
    final_format_score: float = 0.0
    answer_metric: Literal["em", "f1"] = "em"  # f1: partial credit for part of the words
    keep_numbers: bool = False  # True: "3.5" is not "35"

    @classmethod
    def defaults(cls) -> Mapping[str, Any]:
        return SEARCH_R1_CONFIGS


# --- Searching ---


async def search(args: Any, query: str) -> list[Passage]:
    """Search with the configured backend; any hook may call it. Returns at most `topk` passages (`title`, `text`).

    Searches are bounded, retried and counted for the whole process. Raises QueryError if the query is refused,
    SearchError if the search fails, and SearchUnavailableError once the backend is considered down.
    """
    settings = SearchSettings.of(args)
    return await shared_service(settings, lambda: _service(settings)).search(query)


def _service(settings: SearchSettings) -> SearchService:
    part = getattr(settings, settings.search_backend, None)
    limit = part.concurrency if isinstance(part, WebSettings) else settings.search_concurrency
    return SearchService(
        _backend(settings, settings.search_retries),
        concurrency=min(limit, settings.search_concurrency),
        cache_size=settings.search_cache_size,
        max_failure_rate=settings.max_search_failure_rate,
    )


def _backend(settings: SearchSettings, retries: int) -> Backend:
    """The function that searches for one query, with timeout and retries. ValueError if an API key is missing."""
    name, topk, timeout = settings.search_backend, settings.topk, settings.search_timeout
    if name in BUILT_IN:
        read_env_file()  # for keys
        part: LocalSettings | GoogleSettings | AnyWebSettings = getattr(settings, name)
        limit = part.timeout if isinstance(part, WebSettings) else timeout
        return part.backend(topk, min(limit, timeout), retries)
    return guarded_backend(load_hook(name, "search"), name, topk=topk, timeout=timeout, retries=retries)


def check_args(args: Any) -> None:
    """Raise ValueError if these hooks cannot run with these arguments; called before anything starts."""
    settings = SearchSettings.of(args)
    _backend(settings, retries=0)
    if getattr(args, "search_url", None) and settings.search_backend != "local":
        raise ValueError(
            f"--search-url has an effect with the search backend local only, found {settings.search_backend}; drop it, "
            "or add --search-backend local"
        )


async def check_services(args: Any) -> None:
    """Ask the search backend one question; ValueError if it does not answer. Called before anything starts."""
    settings = SearchSettings.of(args)
    await ask_test_question(
        _backend(settings, retries=0),
        settings.search_backend,
        timeout=settings.search_timeout,
        remedy=START_SERVER.format(settings.local.search_url) if settings.search_backend == "local" else "",
    )


# --- The conversation ---


def postprocess_predictions(text: str) -> tuple[str | None, str]:
    """The action of one turn, `search` or `answer`, and its content; (None, "") if there is no valid action.

    The first closed `<search>` or `<answer>` outside of `<think>` counts. Takes time linear in the text's length.
    """
    action = next(iter_actions(text), None)
    if action is None or not action.well_formed:
        return None, ""
    return action.name, action.content


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Hold one conversation; the sample ends with a status and a reason. Evaluation has the same budgets.

    Raises ValueError for settings that are wrong, SearchUnavailableError when the search backend is down.
    """
    settings = SearchSettings.of(args)
    conversation = Conversation(args, sample, sampling_params, stop=STOP, timeout=settings.trajectory_timeout)
    sample.report(searches=0, invalid_actions=0, observation_length=0, search_seconds=0.0)
    counts = sample.rollout_metrics
    opening = think_opened_by_prompt(sample.trace.prompt_ids, conversation.tokenizer)
    while turn := await conversation.turn(keep_cut=True):
        action, content = postprocess_predictions(opening + conversation.text_of(turn.ids))
        opening, correction = "", CORRECTION
        if action == "answer":
            return conversation.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)
        if action is None and turn.limit:
            return conversation.finish(SampleStatus.TRUNCATED, turn.limit)
        if counts["searches"] == settings.max_turns:
            return conversation.finish(SampleStatus.TRUNCATED, StopReason.TURN_LIMIT)
        if action == "search":
            start = time.perf_counter()
            try:
                found = await conversation.wait_for(search(args, content))
                if found is None:
                    break  # its time is over
                passages = found
            except QueryError:  # the model's fault, as a wrong tag is
                action, correction = None, REFUSED
            except SearchError as error:
                return conversation.finish(SampleStatus.FAILED, StopReason.SEARCH_FAILED, str(error))
            counts["search_seconds"] += time.perf_counter() - start
        if action is None:
            counts["invalid_actions"] += 1
            if counts["invalid_actions"] > settings.max_invalid_actions:
                return conversation.finish(SampleStatus.TRUNCATED, StopReason.INVALID_ACTION_LIMIT)
            if not conversation.observe(correction, "correction"):
                break
            continue
        counts["searches"] += 1
        ids = format_observation(passages, conversation.tokenizer, settings.max_observation_tokens)
        if not conversation.observe(ids):
            break
        counts["observation_length"] += len(ids)
    return sample


def think_opened_by_prompt(prompt_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """`<think>` if the prompt ends with it (some chat templates do; it then belongs to the first turn), else ""."""
    return _think_opened_by(tuple(prompt_ids[-8:]), tokenizer)


@lru_cache(maxsize=1024)
def _think_opened_by(prompt_end: tuple[int, ...], tokenizer: PreTrainedTokenizerBase) -> str:
    return "<think>" if decode(prompt_end, tokenizer).rstrip().endswith("<think>") else ""


# --- The reward ---


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """Format-aware exact match as `reward`, and its components; the answer and format errors go into the notes."""
    settings, tokenizer = SearchSettings.of(args), rollout_context().tokenizer
    result = score_response(
        text_segments(sample, tokenizer),
        sample.label,
        score=settings.score,
        format_score=settings.format_score,
        retrieval_score=settings.retrieval_score,
        final_format_score=settings.final_format_score,
        metric=settings.answer_metric,
        keep_numbers=settings.keep_numbers,
        end_of_turn=[tokenizer.eos_token] if isinstance(tokenizer.eos_token, str) else [],
    )
    sample.report(answer=result.answer, invalid_reason=result.invalid_reason)
    return {
        "reward": result.reward,
        "exact_match": float(result.exact_match),
        "f1": result.f1,
        "valid_format": float(result.valid_format),
        "retrieval_hit": float(result.retrieval_hit),
        "answered": float(result.answer is not None),
    }


def check_label(label: Any) -> bool:
    """Whether some answer is right for the label; ValueError for an unreadable one. Called for every row of data."""
    return bool(parse_golden_answers(label))


def text_segments(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """The response as `(source, text)`, one for each segment of the trace."""
    ids, segments = sample.trace.response_ids, sample.trace.segments
    texts: list[tuple[str, str]] = [(s.source, decode(ids[s.start : s.end], tokenizer)) for s in segments]
    if texts and (opening := think_opened_by_prompt(sample.trace.prompt_ids, tokenizer)):
        texts[0] = (texts[0][0], opening + texts[0][1])
    return texts
