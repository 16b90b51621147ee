"""The search conversation by tool calls: the model calls `search(query)`, reads the results, and answers.

With `max_visits` it may also call `visit(url)`, which reads a page.

    --custom-generate-function-path generate_with_tools.generate
    --custom-rm-path generate_with_tools.reward_func          or generate_with_tools.answer_line_reward
    --input-key question --label-key golden_answers

The tool is offered through the model's own chat template, results come back as messages of the role tool, and a turn
without a call is the final answer. Backends are those of `generate_with_search.py`, whose section `search_r1` chooses
one; this hook's own section is `search_tools`. docs/tools.md says more.

The hook renders the prompt itself, with the tool, before the first turn. So rows need no column of tools, the
template's arguments stand beside the protocol that needs them, and a prompt that is a plain question gets the
instruction. From then on token ids are only appended (`sleuth/chat_template.py`).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import generate_with_search
from generate_with_search import SearchSettings, check_label, check_services, search, think_opened_by_prompt
from sleuth.answers import GoldAnswers
from sleuth.chat_template import ToolTemplate
from sleuth.hooks import Conversation, Sample, SampleStatus, Settings, StopReason, decode, rollout_context
from sleuth.prompt_templates import TOOLS_INSTRUCTION
from sleuth.search import QueryError, SearchError
from sleuth.search.items import format_items, format_text
from sleuth.search.observation import neutral
from sleuth.search.pages import VISIT_SECONDS, PageError, read_page
from sleuth.tool_calls import ToolCall, parse_tool_calls, without_thoughts

__all__ = [
    "SearchSettings",  # its section is this hook's too
    "ToolSettings",
    "answer_line_reward",
    "check_args",
    "check_label",
    "check_services",
    "generate",
    "reward_func",
]

SEARCH_TOOLS_CONFIGS: dict[str, Any] = {"preset": "torchtitan"}
"""What people change; `search_tools:` in a --custom-config-path file outranks it, key by key, and both the preset."""

PRESETS: dict[str, dict[str, Any]] = {
    "torchtitan": {"max_turns": 4, "max_searches": 4, "max_trajectory_tokens": 3072, "max_turn_tokens": 512},
    "webagent": {"max_turns": 6, "max_searches": 4, "max_trajectory_tokens": 8192, "max_turn_tokens": 8192},
}


def _tool(name: str, description: str, parameter: str, meaning: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SEARCH = _tool(
    *("search", "Searches for passages that help to answer a question."),
    *("query", "What to search for, in a few words."),
)
VISIT = _tool("visit", "Reads a web page, what matters to the question first.", "url", "The address of the page.")
TOOLS = [SEARCH]
"""What a model is offered; with `max_visits` VISIT, too."""
URL = re.compile(r"\s*https?://\S", re.IGNORECASE)
ANSWER_LINE = re.compile(r"^[\s*]*Answer:[ \t*]*(\S.*?)[\s*]*$", re.MULTILINE)


class ToolSettings(Settings, section="search_tools"):
    """The section `search_tools`. What a preset says (PRESETS) has no default here."""

    preset: Literal["torchtitan", "webagent"]
    max_turns: int = Field(ge=1)  # of the model, the answer's included
    max_searches: int = Field(ge=0)
    max_visits: int = Field(default=0, ge=0)  # pages of a trajectory; 0: the tool `visit` is not offered
    visit_timeout: float = Field(default=VISIT_SECONDS, gt=0)  # seconds a page
    max_trajectory_tokens: int = Field(ge=1)  # prompt, turns and results; --rollout-max-context-len bounds them too
    max_turn_tokens: int = Field(ge=1)  # new ones; --rollout-max-response-len bounds them too
    max_calls_per_turn: int = Field(default=4, ge=1)
    max_tool_tokens: int = Field(default=1024, ge=16)  # of a result, in whole items
    max_invalid_actions: int = Field(default=2, ge=0)  # turns with a wrong call; one more ends the trajectory
    trajectory_timeout: float | None = Field(default=None, gt=0)  # seconds
    thinking: bool = False  # `enable_thinking` of the template
    instruction: str = TOOLS_INSTRUCTION  # the system's message before a prompt that is a text; "": none
    no_search_penalty: float = 0.0  # taken from the reward of a trajectory that never searched
    retrieval_score: float = 0.0  # for a wrong answer where a right one stands in a result
    truncation_reward: float = 0.0  # of a trajectory that a budget ended
    no_answer_reward: float = -0.1  # answer_line_reward's, where there is no line with an answer

    @classmethod
    def defaults(cls) -> Mapping[str, Any]:
        return SEARCH_TOOLS_CONFIGS

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, values: Any) -> Any:
        preset = values.get("preset") if isinstance(values, Mapping) else None
        return {**PRESETS[preset], **values} if isinstance(preset, str) and preset in PRESETS else values


def check_args(args: Any) -> None:
    """ValueError if these hooks could not run with these arguments; called before anything starts."""
    settings = ToolSettings.of(args)
    generate_with_search.check_args(args)
    folder = getattr(args, "hf_checkpoint", None)
    if folder and Path(folder).is_dir():  # a plan may be for another machine
        _template(args, settings, AutoTokenizer.from_pretrained(folder)).check()


def _template(args: Any, settings: ToolSettings, tokenizer: PreTrainedTokenizerBase) -> ToolTemplate:
    kwargs = {**(getattr(args, "apply_chat_template_kwargs", None) or {}), "enable_thinking": settings.thinking}
    return ToolTemplate(tokenizer, [*TOOLS, VISIT] if settings.max_visits else TOOLS, kwargs)


# --- The conversation ---


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Hold one conversation; the sample ends with a status and a reason. Evaluation has the same budgets.

    Raises ValueError for settings that are wrong, SearchUnavailableError when the search backend is down.
    """
    settings = ToolSettings.of(args)
    new_tokens = min(sampling_params["max_new_tokens"], settings.max_turn_tokens)
    conversation = Conversation(
        args, sample, {**sampling_params, "max_new_tokens": new_tokens}, timeout=settings.trajectory_timeout
    )
    conversation.max_tokens = min(conversation.max_tokens, settings.max_trajectory_tokens)
    template = _template(args, settings, conversation.tokenizer)
    messages = _messages(sample.prompt, settings)
    sample.trace.prompt_ids = template.prompt(messages, sample.where)
    tools = ToolRunner(args, settings, messages, conversation.tokenizer)
    sample.report(searches=0, tool_calls=0, invalid_actions=0, observation_length=0, search_seconds=0.0)
    if settings.max_visits:
        sample.report(visits=0)
    counts = sample.rollout_metrics
    while True:
        opening = think_opened_by_prompt(sample.trace.token_ids, conversation.tokenizer)
        turn = await conversation.turn()
        if turn is None:
            return sample
        calls = parse_tool_calls(opening + _text(turn.ids, conversation.tokenizer))
        if not calls:
            return conversation.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)
        counts["tool_calls"] += len(calls)
        if conversation.turns == settings.max_turns:
            return conversation.finish(SampleStatus.TRUNCATED, StopReason.TURN_LIMIT)
        start = time.perf_counter()
        try:
            results = await conversation.wait_for(tools.results(calls))
        except SearchError as error:
            return conversation.finish(SampleStatus.FAILED, StopReason.SEARCH_FAILED, str(error))
        counts["search_seconds"] += time.perf_counter() - start
        if results is None:
            return sample
        done = [result.did for result in results if result.did]
        counts["searches"] += done.count("search")
        if settings.max_visits:
            counts["visits"] += done.count("visit")
        counts["invalid_actions"] += any(result.wrong for result in results)
        if counts["invalid_actions"] > settings.max_invalid_actions:
            return conversation.finish(SampleStatus.TRUNCATED, StopReason.INVALID_ACTION_LIMIT)
        ids = template.between([result.text for result in results], turn.ids, [_name(call) for call in calls])
        if not conversation.observe(ids, "observation" if done else "correction"):
            return sample
        counts["observation_length"] += len(ids)


def _name(call: ToolCall) -> str:
    """The tool's name for its message: one of ours, whatever the model wrote."""
    return "visit" if call.name == "visit" else "search"


def _messages(prompt: str | list[dict[str, Any]], settings: ToolSettings) -> list[dict[str, Any]]:
    """The row's messages; a text becomes the user's, after the instruction."""
    if not isinstance(prompt, str):
        return prompt
    system = [{"role": "system", "content": settings.instruction}] if settings.instruction else []
    return [*system, {"role": "user", "content": prompt}]


def _text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a turn without the tokens that end it."""
    end = len(ids)
    while end and ids[end - 1] in tokenizer.all_special_ids:
        end -= 1
    return decode(ids[:end], tokenizer)


class Result(NamedTuple):
    """What a tool's message says; the tool that was run for it, if any; whether the call was wrong."""

    text: str
    did: Literal["search", "visit"] | None = None
    wrong: bool = False


class ToolRunner:
    """Runs the calls of one trajectory within its budgets of searches and pages."""

    def __init__(
        self,
        args: Any,
        settings: ToolSettings,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.args, self.settings, self.tokenizer = args, settings, tokenizer
        self.left = {"search": settings.max_searches, "visit": settings.max_visits}
        asked = [message.get("content") for message in messages if message.get("role") == "user"]
        self.question = asked[-1] if asked and isinstance(asked[-1], str) else ""
        self.query = ""  # the latest one

    async def results(self, calls: Sequence[ToolCall]) -> list[Result]:
        """The result of each call, in order; they run at once. SearchError where a search fails."""
        return list(await asyncio.gather(*[self._start(number, call) for number, call in enumerate(calls)]))

    def _start(self, number: int, call: ToolCall) -> Awaitable[Result]:
        """The call under way, if the budgets allow it; else what its message says."""
        if error := self._error(call):
            return _told(Result(neutral(f"Error: {error}.", self.tokenizer), wrong=True))
        if number >= self.settings.max_calls_per_turn:
            return _told(Result(f"Not run: at most {self.settings.max_calls_per_turn} calls a turn."))
        if self.left[call.name] < 1:
            what = "searches" if call.name == "search" else "visits"
            return _told(Result(f"Not run: no {what} are left. Answer with what you know."))
        self.left[call.name] -= 1
        if call.name == "visit":
            return self._visit(call.arguments["url"])
        self.query = call.arguments["query"]
        return self._search(self.query)

    def _error(self, call: ToolCall) -> str | None:
        """What is wrong with a call, for its writer to read; None if it can be made."""
        if call.error:
            return call.error
        if call.name == "visit" and self.settings.max_visits:
            url = call.arguments.get("url")
            return None if isinstance(url, str) and URL.match(url) else 'visit expects "url", an http or https address'
        if call.name != "search":
            others = "there are search and visit" if self.settings.max_visits else "the only one is search"
            return f"there is no tool {call.name[:50]!r}; {others}"
        query = call.arguments.get("query")
        if not isinstance(query, str) or not query.strip():
            return 'search expects "query", a text that is not blank'
        return None

    async def _search(self, query: str) -> Result:
        try:
            passages = await search(self.args, query)
        except QueryError:  # of the model's making, as a wrong call is
            self.left["search"] += 1
            return Result("Error: that query was refused; write a short question.", wrong=True)
        return Result(format_items(passages, self.tokenizer, self.settings.max_tool_tokens), "search")

    async def _visit(self, url: str) -> Result:
        """The page, what matters to the question and to the latest query first; one that cannot be read is told."""
        chosen = SearchSettings.of(self.args)
        proxy = getattr(getattr(chosen, chosen.search_backend, None), "proxy", None)
        try:
            wanted = f"{self.question} {self.query}"
            text = await read_page(url.strip(), wanted, proxy=proxy, seconds=self.settings.visit_timeout)
        except PageError as error:
            return Result(f"Error: {error}.", "visit")
        return Result(format_text(text, self.tokenizer, self.settings.max_tool_tokens), "visit")


async def _told(result: Result) -> Result:
    return result


# --- The rewards ---


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """Exact match of the final answer as `reward`, and what it is made of; the answer is noted.

    1.0 for a right answer; `retrieval_score` for another where a right one stands in a result; `truncation_reward` for
    a trajectory that a budget ended; `no_search_penalty` less where nothing was searched.
    """
    settings = ToolSettings.of(args)
    found = _compare(sample)
    if sample.status is SampleStatus.TRUNCATED:
        reward = settings.truncation_reward
    elif found["exact_match"]:
        reward = 1.0
    else:
        reward = settings.retrieval_score * found["retrieval_hit"]
    return {"reward": reward - settings.no_search_penalty * (1.0 - found["searched"]), **found}


async def answer_line_reward(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """`reward` by the last line `Answer: ...` of the final turn: 1.0 right, 0.0 wrong, `no_answer_reward` if none."""
    found = _compare(sample)
    line = ANSWER_LINE.search(_final_text(sample) or "")
    reward = found["exact_match"] if line else ToolSettings.of(args).no_answer_reward
    return {"reward": reward, **found, "answer_line": float(line is not None)}


def final_answer(sample: Sample) -> str | None:
    """What follows `Answer:` in the last such line of the final turn, or else all of it; None where there is none."""
    text = _final_text(sample)
    if text is None:
        return None
    lines = ANSWER_LINE.findall(text)
    return lines[-1] if lines else text


def _final_text(sample: Sample) -> str | None:
    """The last turn without its thoughts, if it called nothing and holds anything."""
    trace, tokenizer = sample.trace, rollout_context().tokenizer
    if sample.stop_reason != StopReason.ANSWERED or not trace.segments:
        return None
    start = trace.segments[-1].start
    before = trace.prompt_ids + trace.response_ids[:start]
    text = think_opened_by_prompt(before, tokenizer) + _text(trace.response_ids[start:], tokenizer)
    return without_thoughts(text).strip() or None


def _compare(sample: Sample) -> dict[str, float]:
    """The parts of a reward: how the answer and the results compare with the label."""
    gold, answer = GoldAnswers.of(sample.label), final_answer(sample)
    exact_match, f1 = gold.compare(answer or "")
    trace, tokenizer = sample.trace, rollout_context().tokenizer
    results = (
        decode(trace.response_ids[s.start : s.end], tokenizer) for s in trace.segments if s.source == "observation"
    )
    sample.report(answer=answer)
    return {
        "exact_match": float(exact_match),
        "f1": f1,
        "retrieval_hit": float(gold.found_in(results)),
        "answered": float(answer is not None),
        "searched": float(sample.rollout_metrics.get("searches", 0) > 0),
    }
