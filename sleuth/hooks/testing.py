"""Runs hooks without an engine: a script says what the model says.

    sample, engine = converse(generate, ["<calc>12 * 7</calc>", "84"], prompt="12 * 7?", tokenizer=tokenizer,
                              reward=reward_func, label="84")
    assert sample.reward == 1.0

Tokenizer, hooks, trace and budgets are real; only the model's words come from the script.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sleuth.hooks.context import Generation, RolloutContext, use_rollout_context
from sleuth.sample import Sample, TokenTrace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ScriptedEngine:
    """Returns scripted turns one after the other, as an engine would: whole tokens, stop strings, a token limit.

    A turn is a text, which is generated up to the token in which the first stop string ends, or a finished Generation.
    `requests` records the ids and sampling parameters of each request. A request beyond the script is an IndexError.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, turns: Sequence[str | Generation]) -> None:
        self._tokenizer = tokenizer
        self._turns = list(turns)
        self.requests: list[tuple[list[int], dict[str, Any]]] = []

    async def generate(self, input_ids: Sequence[int], sampling_params: dict[str, Any]) -> Generation:
        number = len(self.requests)
        self.requests.append((list(input_ids), dict(sampling_params)))
        if number >= len(self._turns):
            raise IndexError(f"the script has {len(self._turns)} turns; the hook asked for one more")
        turn = self._turns[number]
        if isinstance(turn, Generation):
            return turn
        stop = sampling_params.get("stop") or ()
        ids, text = self._generate(turn, [stop] if isinstance(stop, str) else stop)
        limit = sampling_params["max_new_tokens"]
        if len(ids) >= limit:  # SGLang looks at the limit before the stop strings
            ids = ids[:limit]
            return Generation(ids, _log_probs(limit), str(self._tokenizer.decode(ids)), "length", "1")
        return Generation(ids, _log_probs(len(ids)), text, "stop", "1")

    async def score(self, input_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of each id but the first, made up as those of `generate` are."""
        return _log_probs(len(input_ids) - 1)

    def _generate(self, turn: str, stop: Sequence[str]) -> tuple[list[int], str]:
        ids: list[int] = []
        for token in self._tokenizer.encode(turn, add_special_tokens=False):
            ids.append(token)
            text = str(self._tokenizer.decode(ids))
            ends = [text.index(string) + len(string) for string in stop if string in text]
            if ends:
                return ids, text[: min(ends)]
        return ids, turn


def _log_probs(count: int) -> list[float]:
    return [-0.01 * (position + 1) for position in range(count)]


async def no_reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """A reward hook that gives 0 for everything, for trying a generate hook alone."""
    return 0.0


def converse(
    generate: Callable[..., Awaitable[Sample]],
    turns: Sequence[str | Generation],
    *,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str = "A question.",
    label: Any = None,
    reward: Callable[..., Awaitable[float | dict[str, float]]] | None = None,
    args: Any = None,
    **sampling_params: Any,
) -> tuple[Sample, ScriptedEngine]:
    """Run a generate hook on a prompt, then the reward hook if one is given; returns the sample and the engine.

    `args`: the run's arguments [no context limit, no settings]. `sampling_params` are laid over 512 new tokens at
    temperature 1.
    """
    engine = ScriptedEngine(tokenizer, turns)
    args = args or SimpleNamespace(custom_config={}, rollout_max_context_len=None)
    sample = Sample(0, 0, prompt, TokenTrace(tokenizer.encode(prompt, add_special_tokens=False)), label=label)

    async def run() -> Sample:
        done = await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 512, "stop": [], **sampling_params})
        if reward is not None:
            result = await reward(args, done)
            done.set_reward(result)
        return done

    with use_rollout_context(RolloutContext(engine, tokenizer)):
        return asyncio.run(run()), engine
