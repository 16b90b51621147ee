"""What a hook may use while it runs: the engine and the tokenizer of the rollout under way.

    context = rollout_context()
    generation = await context.engine.generate(sample.trace.token_ids, sampling_params)

A test sets its own with `use_rollout_context(RolloutContext(ScriptedEngine(...), tokenizer))`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sleuth.sample import check_reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopRunError(RuntimeError):
    """Raised in a hook, it ends the run: for what no other trajectory could survive, such as a service that is down.

    Every other exception of a hook makes its own sample FAILED, and another is generated in its place.
    """


class FailSample(Exception):
    """Raised in a hook, it makes the sample FAILED for a reason of the hook's own, counted as `rollout/stop/<reason>`.

    The sample is replaced by another of its prompt, up to `--max-failure-rate`. `reason`: a word of small letters,
    digits and `_`.
    """

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = check_reason(reason)


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
        """Continue `input_ids`; the number of requests under way is bounded inside.

        A stop string is kept: `text` ends right after it.
        """
        ...


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What hooks share while a rollout runs. `vocab_size`: ids of the model, None if not known."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int | None = None


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


StepMetrics = Callable[[], dict[str, float]]
_step_metrics: list[StepMetrics] = []


def step_metrics(drain: StepMetrics) -> StepMetrics:
    """Decorates a function whose numbers become metrics of each step, under the names it returns.

    For what belongs to no sample, such as a service's latency. It is called once a step and once an evaluation, in the
    process of the hooks, and returns what was counted since the call before.
    """
    _step_metrics.append(drain)
    return drain


def drain_step_metrics() -> dict[str, float]:
    """What all functions under `step_metrics` return now."""
    return {name: value for drain in _step_metrics for name, value in drain().items()}
