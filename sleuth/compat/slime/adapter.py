"""Between this project's samples and those of a hook written for slime.

`adapted` wraps such a hook. The hook gets a sample and arguments of slime's kind; what it filled in becomes the trace
that is trained on. Its ids are kept as they are. Where they are not those that the engine sampled or read, because the
hook sent text and encoded the answer anew, one warning says how many drifted.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from difflib import SequenceMatcher
from numbers import Real
from typing import Any, Literal

from sleuth.compat.slime.engine import SlimeArgs, Trajectory, trajectory, with_slime_params
from sleuth.compat.slime.types import Sample as SlimeSample
from sleuth.compat.slime.types import SampleStatus as Status
from sleuth.hooks.context import FailSample, rollout_context
from sleuth.sample import Sample, SampleStatus, StopReason, TokenTrace
from sleuth.tokens import decode

logger = logging.getLogger(__name__)

IMPORTS_SLIME = re.compile(r"^\s*(?:from|import)\s+slime\b", re.MULTILINE)
LARGEST_COMPARISON = 2**22
"""Pairs of tokens; two stretches that have more are taken to differ as a whole."""
Hook = Callable[..., Any]

_latest: ContextVar[tuple[Sample, SlimeSample] | None] = ContextVar("sleuth_compat_slime_latest", default=None)
"""The sample of the trajectory under way in both forms, for the reward hook that follows."""


def written_for_slime(hook: Hook) -> bool:
    """Whether the file that defines the hook imports slime."""
    module = sys.modules.get(getattr(hook, "__module__", ""))
    try:
        return module is not None and IMPORTS_SLIME.search(inspect.getsource(module)) is not None
    except (OSError, TypeError):
        return False


def adapted(hook: Hook, kind: Literal["generate", "reward"]) -> Hook:
    """The hook itself, or what runs it on this project's samples if it was written for slime."""
    if not written_for_slime(hook):
        return hook
    return _generate_hook(hook) if kind == "generate" else _reward_hook(hook)


def _name(hook: Hook) -> str:
    return f"{hook.__module__}.{getattr(hook, '__qualname__', type(hook).__name__)}"


# --- Generate hooks ---


def _generate_hook(hook: Hook) -> Hook:
    told = False
    takes_evaluation = "evaluation" in inspect.signature(hook).parameters

    async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
        nonlocal told
        limit = getattr(args, "rollout_max_context_len", None)
        calls = Trajectory(limit)
        given = as_slime(sample, with_response=False)
        extra = {"evaluation": evaluation} if takes_evaluation else {}
        token = trajectory.set(calls)
        try:
            filled = await hook(SlimeArgs(args), given, with_slime_params(sampling_params), **extra)
        finally:
            trajectory.reset(token)
        if not isinstance(filled, SlimeSample):
            raise ValueError(f"expected one Sample, found {type(filled).__name__}; one prompt makes one sample here")
        warning = await fill(sample, filled, calls, limit)
        if warning and not told:
            told = True
            logger.warning("generate hook %s: %s This is told once.", _name(hook), warning)
        _latest.set((sample, filled))
        return sample

    generate.__module__, generate.__qualname__ = hook.__module__, getattr(hook, "__qualname__", "generate")
    return generate


def as_slime(sample: Sample, *, with_response: bool = True) -> SlimeSample:
    """A sample in slime's form; a prompt that was rendered is its text."""
    tokenizer, trace = rollout_context().tokenizer, sample.trace
    rendered = isinstance(sample.prompt, str) or trace.prompt_ids
    made = SlimeSample(
        group_index=sample.group_index,
        index=sample.index,
        prompt=decode(trace.prompt_ids, tokenizer) if rendered else sample.prompt,
        label=sample.label,
        metadata=dict(sample.metadata),
    )
    if with_response:
        made.tokens, made.response_length = trace.token_ids, len(trace.response_ids)
        made.response = decode(trace.response_ids, tokenizer)
        made.loss_mask, made.rollout_log_probs = list(trace.loss_mask), list(trace.log_probs)
        made.status = Status(sample.status.value)
    return made


async def fill(sample: Sample, filled: SlimeSample, calls: Trajectory, limit: int | None) -> str:
    """Finish `sample` with what a hook filled in. Returns a warning of ids that drifted, or nothing.

    Raises ValueError if its lists do not fit together, FailSample if the hook says that it failed.
    """
    if filled.status is Status.FAILED:
        raise FailSample("hook_failed", "the hook set Sample.Status.FAILED")
    if filled.status is Status.ABORTED:
        sample.finish(SampleStatus.ABORTED, StopReason.ENGINE_ABORT, "the hook set Sample.Status.ABORTED")
        return ""
    length, tokens = filled.response_length, list(filled.tokens)
    mask = [1] * length if filled.loss_mask is None else [int(entry) for entry in filled.loss_mask]
    if not 0 <= length < len(tokens) or len(mask) != length:
        raise ValueError(
            f"expected tokens of the prompt and of the response, and a loss_mask as long as the response, found "
            f"{len(tokens)} tokens, response_length {length} and {len(mask)} in loss_mask"
        )
    start = len(tokens) - length
    drifted, warning = _drift(tokens, mask, calls)
    log_probs = await _log_probs(filled, tokens, mask, calls)
    cut = limit is not None and len(tokens) > limit
    room = max(0, (limit or 0) - start) if cut else length
    if filled.remove_sample:
        mask = [0] * length
    sample.trace = _trace(tokens[:start], tokens[start : start + room], mask[:room], log_probs[:room])
    versions = [call.generation.weight_version for call in calls.calls]
    sample.weight_version = versions[-1] if versions else None
    sample.report(turns=len(calls.calls), drifted_tokens=drifted)
    if cut:
        sample.finish(SampleStatus.TRUNCATED, StopReason.CONTEXT_LIMIT)
    elif filled.status is Status.TRUNCATED:
        sample.finish(SampleStatus.TRUNCATED, StopReason.RESPONSE_LIMIT)
    else:
        sample.finish(SampleStatus.COMPLETED, StopReason.ENDED)
    return warning


def _trace(prompt: list[int], ids: list[int], mask: list[int], log_probs: list[float]) -> TokenTrace:
    kept = [value if trained else 0.0 for value, trained in zip(log_probs, mask, strict=True)]
    trace = TokenTrace(prompt, ids, mask, kept)
    trace.check(rollout_context().vocab_size)
    return trace


def _drift(tokens: list[int], mask: list[int], calls: Trajectory) -> tuple[int, str]:
    """How many ids are not those that the engine sampled or read, and a sentence about them."""
    if not calls.calls:
        return 0, ""
    last = calls.calls[-1]
    seen = last.input_ids + last.generation.ids
    trained = [token for token, used in zip(tokens[len(tokens) - len(mask) :], mask, strict=True) if used]
    sampled = [token for call in calls.calls for token in call.generation.ids]
    changed = len(trained) - sum(size for _, _, size in matches(trained, sampled))
    unread = len(seen) - sum(size for _, _, size in matches(seen, tokens))
    if not changed and not unread:
        return 0, ""
    return changed + unread, (
        f"{changed} of {len(trained)} trained tokens are not those that the engine sampled, and {unread} of the "
        f"{len(seen)} tokens that it read and wrote last are not in what is trained on: text was encoded anew. Take "
        "the ids of meta_info.output_token_logprobs, and send input_ids (docs/coming-from-slime.md)."
    )


async def _log_probs(filled: SlimeSample, tokens: list[int], mask: list[int], calls: Trajectory) -> list[float]:
    """The hook's own log-probabilities; where it has none, the engine's of the same tokens, scored where they drifted.

    The engine scores at temperature 1.
    """
    if filled.rollout_log_probs is not None:
        if len(filled.rollout_log_probs) != len(mask):
            raise ValueError(
                f"expected a log-probability for each of {len(mask)} response tokens, found "
                f"{len(filled.rollout_log_probs)} in rollout_log_probs"
            )
        return [float(value or 0.0) for value in filled.rollout_log_probs]
    start = len(tokens) - len(mask)
    places = [place for place, used in enumerate(mask) if used]
    trained = [tokens[start + place] for place in places]
    sampled = [token for call in calls.calls for token in call.generation.ids]
    known = [value for call in calls.calls for value in call.generation.log_probs]
    found: list[float | None] = [None] * len(mask)
    for mine, theirs, size in matches(trained, sampled):
        for offset in range(size):
            found[places[mine + offset]] = known[theirs + offset]
    if any(found[place] is None for place in places):
        scores = await rollout_context().engine.score(tokens)  # type: ignore[attr-defined]  # engines have it
        found = [scores[start + place - 1] if value is None else value for place, value in enumerate(found)]
    return [value or 0.0 for value in found]


def matches(left: list[int], right: list[int]) -> list[tuple[int, int, int]]:
    """Stretches that two lists have in common, in order: where each begins in both, and its length."""
    if left == right[: len(left)]:
        return [(0, 0, len(left))]
    ends = min(len(left), len(right))
    head = next((i for i in range(ends) if left[i] != right[i]), ends)
    tail = next((i for i in range(ends - head) if left[-1 - i] != right[-1 - i]), ends - head)
    a, b = left[head : len(left) - tail], right[head : len(right) - tail]
    found = [(0, 0, head)]
    if len(a) * len(b) <= LARGEST_COMPARISON:
        blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
        found += [(head + i, head + j, size) for i, j, size in blocks]
    return [*found, (len(left) - tail, len(right) - tail, tail)]


# --- Reward hooks ---


def _reward_hook(hook: Hook) -> Hook:
    async def reward(args: Any, sample: Sample, **kwargs: Any) -> float | dict[str, float]:
        latest = _latest.get()
        given = latest[1] if latest is not None and latest[0] is sample else as_slime(sample)
        result = given.reward if given.reward is not None else await hook(SlimeArgs(args), given, **kwargs)
        return as_reward(result, sample, SlimeArgs(args).reward_key)

    reward.__module__, reward.__qualname__ = hook.__module__, getattr(hook, "__qualname__", "reward")
    return reward


def as_reward(result: Any, sample: Sample, key: str | None = None) -> Any:
    """A number, or parts with the total as `reward`: the entry `key`, or else `reward` or `score`.

    Parts that are no numbers become notes of the sample. ValueError if no part is the total.
    """
    if not isinstance(result, Mapping):
        return result
    total = next((name for name in (key, "reward", "score") if name is not None and name in result), None)
    if total is None:
        raise ValueError(
            f"expected reward or score among the parts of a reward, found {', '.join(map(str, result))}; name the "
            "total by reward_key in the YAML section custom"
        )
    sample.report(**{name: value for name, value in result.items() if not isinstance(value, Real)})
    parts = {name: float(value) for name, value in result.items() if isinstance(value, Real) and name != total}
    return {**parts, "reward": result[total]}
