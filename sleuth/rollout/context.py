"""What a hook may use while it runs: the engine and the tokenizer of the rollout under way.

    context = rollout_context()
    generation = await context.engine.generate(sample.trace.token_ids, sampling_params)

A test sets its own with `use_rollout_context(RolloutContext(ScriptedEngine(...), tokenizer))`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Generation:
    """One turn of the model, as the engine returned it.

    `ids` and `log_probs` (nats, at the sampling temperature) are equally long and include the
    end-of-sequence token or the whole token in which a stop string ended. `text` is the engine's
    view, cut right after the stop string.
    """

    ids: list[int]
    log_probs: list[float]
    text: str
    finish_reason: Literal["stop", "length", "abort"]
    weight_version: str | None = None


class Engine(Protocol):
    """Anything that continues token ids: the real engines, or a script in a test."""

    async def generate(self, input_ids: Sequence[int], sampling_params: dict[str, Any]) -> Generation:
        """Continue `input_ids`; the number of requests under way is bounded inside."""
        ...


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What hooks share while a rollout runs."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase


_current: ContextVar[RolloutContext] = ContextVar("sleuth_rollout_context")


def rollout_context() -> RolloutContext:
    """The context of the rollout that runs the calling hook; LookupError outside of one."""
    try:
        return _current.get()
    except LookupError:
        raise LookupError(
            "no rollout is under way: hooks run inside one, or in `with use_rollout_context(...)` in a test"
        ) from None


@contextmanager
def use_rollout_context(context: RolloutContext) -> Iterator[None]:
    """Within, `rollout_context()` returns `context`, also in tasks that are started meanwhile."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
