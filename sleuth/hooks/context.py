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
    """A hook raises it to end the run, for example because a service is down that every trajectory needs.

    Any other exception only makes the hook's own sample FAILED, and another sample is generated in its place.
    """


class FailSample(Exception):
    """A hook raises it to make its sample FAILED for a `reason` that it names, counted as `rollout/stop/<reason>`.

    Another sample of the prompt is generated in its place, up to `--max-failure-rate`. `reason` is a word of
    lower-case letters, digits and `_`.
    """

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = check_reason(reason)


@dataclass(frozen=True, slots=True)
class Generation:
    """One turn of the model, as the engine returned it.

    `ids` and `log_probs` (nats, at the sampling temperature) are equally long. They include the
    end-of-sequence token, or the whole token in which a stop string ended; `text` is cut right after the
    stop string.
    """

    ids: list[int]
    log_probs: list[float]
    text: str
    finish_reason: Literal["stop", "length", "abort"]
    weight_version: str | None = None


class Engine(Protocol):
    """Anything that continues token ids: real engines, or a scripted one in a test."""

    async def generate(self, input_ids: Sequence[int], sampling_params: dict[str, Any]) -> Generation:
        """Continue `input_ids`. The engine itself bounds how many requests are under way.

        If a stop string ends the generation, `text` ends right after it.
        """
        ...


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What all hooks share while a rollout runs.

    `vocab_size`: rows of the model's embedding, None if not known. `workers`: processes in which hooks run.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int | None = None
    workers: int = 1


_current: ContextVar[RolloutContext] = ContextVar("sleuth_rollout_context")


def rollout_context() -> RolloutContext:
    """The context of the rollout that runs the calling hook; LookupError outside of one."""
    try:
        return _current.get()
    except LookupError:
        raise LookupError(
            "no rollout is under way: hooks run inside one, or in `with use_rollout_context(...)` in a test"
        ) from None


def share_of(limit: int) -> int:
    """This process's share of a limit that holds for the whole rollout, such as of requests under way; at least 1."""
    context = _current.get(None)
    return limit if context is None else max(1, limit // context.workers)


@contextmanager
def use_rollout_context(context: RolloutContext) -> Iterator[None]:
    """Inside the block, and in tasks that are started in it, `rollout_context()` returns `context`."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


StepMetrics = Callable[[], dict[str, float]]
_step_metrics: list[StepMetrics] = []


def step_metrics(drain: StepMetrics) -> StepMetrics:
    """Decorator for a function that returns metrics of each step, by name.

    Use it for numbers that belong to no sample, such as the latency of a service. The function is called once for each
    step and each evaluation, in each process of the hooks, and returns what was counted since its last call. With
    --rollout-workers each metric is the mean over the processes that return it.
    """
    _step_metrics.append(drain)
    return drain


def drain_step_metrics() -> dict[str, float]:
    """Call all functions decorated with `step_metrics`, and return their metrics together."""
    return {name: value for drain in _step_metrics for name, value in drain().items()}
