"""Runs the user's hooks on one sample, within a time limit; a hook that fails costs only its own sample.

An exception in a hook makes the sample FAILED: the reason is counted, `sample.error` names the line of the hook, and
the traceback is logged. Only StopRunError is passed on: it ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

from sleuth.activity import noted
from sleuth.arguments import Args
from sleuth.compat.slime.adapter import adapted
from sleuth.hooks import FailSample, StopRunError, accepts_evaluation, load_hook, rollout_context, single_turn
from sleuth.metrics.progress import Report
from sleuth.rollout.routing import one_trajectory
from sleuth.rollout.user_code import user_place
from sleuth.rollout.watch import Call, HookBlockedError, Kind, Watch
from sleuth.sample import Sample, SampleStatus, StopReason, TokenTrace, check_reason, shortened
from sleuth.secrets import redact

logger = logging.getLogger(__name__)

UNUSABLE = (SampleStatus.FAILED, SampleStatus.ABORTED)
LARGEST_REWARD = 1e6
"""A reward beyond it is told."""
LONGEST_MESSAGE = 1000
"""Characters of an exception's text that are kept; a sample's error also says where it was raised."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """The user's functions, already loaded, their signatures checked; those written for slime are wrapped."""

    generate: Callable[..., Awaitable[Sample]]
    reward: Callable[..., Awaitable[float | dict[str, float]]]
    keep_group: Callable[[Args, list[Sample]], bool] | None = None


def load_hooks(args: Args) -> Hooks:
    """The hooks that the flags name; ValueError if one does not exist or has a wrong signature."""
    generate, keep = args.custom_generate_function_path, args.dynamic_sampling_filter_path
    return Hooks(
        generate=adapted(load_hook(generate, "generate"), "generate") if generate else single_turn.generate,
        reward=adapted(load_hook(args.custom_rm_path, "reward"), "reward"),
        keep_group=load_hook(keep, "filter") if keep else None,
    )


class HookRunner:
    """Runs generate and reward hooks, and keeps track of those under way."""

    def __init__(
        self,
        args: Args,
        hooks: Hooks,
        on_error: Callable[[Sample, BaseException], None] | None = None,
        report: Report | None = None,
    ) -> None:
        """`on_error` is called with what a hook raised, in addition to the log; `report`: see `Watch`."""
        self.args, self.hooks, self._on_error = args, hooks, on_error
        self._watch = Watch(args.hook_timeout, report)
        self._told_large = False
        self._takes_evaluation = accepts_evaluation(hooks.generate)

    async def run(self, sample: Sample, params: dict[str, Any], evaluation: bool) -> Sample:
        """The finished and scored sample, or a FAILED one with the reason if a hook failed. Passes on StopRunError."""
        extra = {"evaluation": evaluation} if self._takes_evaluation else {}
        try:
            async with self._call("generate", sample):
                with one_trajectory():
                    returned = await self.hooks.generate(self.args, sample, dict(params), **extra)
                sample = _checked(returned, getattr(self.args, "rollout_max_context_len", None))
            if sample.status not in UNUSABLE:
                async with self._call("reward", sample):
                    sample.set_reward(await self.hooks.reward(self.args, sample))
                    self._tell_large(sample)
                    _check_report(sample)
        except _HookFailedError as failure:
            sample.status, sample.stop_reason, sample.error = SampleStatus.FAILED, failure.reason, str(failure)
        self._watch.ended(sample, usable=sample.status not in UNUSABLE)
        return sample

    def _tell_large(self, sample: Sample) -> None:
        """Warn, once, of a reward that drowns the others of its group, or what the trainer computes in float32."""
        largest = max(abs(value) for value in (sample.reward or 0.0, *sample.reward_components.values()))
        if largest > LARGEST_REWARD and not self._told_large:
            self._told_large = True
            logger.warning(
                "reward hook %s gave %.3g for sample %d (%s): expected at most %.0e in size; the loss is computed in "
                "float32, and such a value drowns all others. Scale or bound it",
                *(_name(self.hooks.reward), largest, sample.index, sample.where, LARGEST_REWARD),
            )

    @asynccontextmanager
    async def _call(self, kind: Kind, sample: Sample) -> AsyncIterator[None]:
        """Watch the hook in the block, bound it by `--hook-timeout`, and raise its errors as _HookFailedError."""
        limit = asyncio.timeout(self.args.hook_timeout)
        task = asyncio.current_task()
        with noted() as activities:
            call = Call(kind, sample, task, time.monotonic(), activities)
            self._watch.calls[id(call)] = call
            try:
                async with limit:
                    yield
            except (KeyboardInterrupt, GeneratorExit):
                raise  # of someone who wants an end
            except BaseException as error:  # some libraries' errors are no Exception
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise  # the rollout ends; else the hook awaited something that others cancelled
                cause = _cause(error)
                if isinstance(cause, StopRunError):
                    raise cause from None
                timed_out = limit.expired() or isinstance(cause, HookBlockedError)
                raise self._failure(kind, sample, cause, timed_out=timed_out) from None
            finally:
                del self._watch.calls[id(call)]

    def _failure(self, kind: Kind, sample: Sample, error: BaseException, *, timed_out: bool) -> _HookFailedError:
        name = _name(self.hooks.generate if kind == "generate" else self.hooks.reward)
        where = f"{kind} hook {name}"
        logger.info("%s failed on sample %d (%s)", where, sample.index, sample.where, exc_info=error)
        if self._on_error is not None:
            self._on_error(sample, error)
        if timed_out:
            text = f"{where}: no result within --hook-timeout {self.args.hook_timeout:g} s{user_place(error)}"
            return _HookFailedError(StopReason.HOOK_TIMEOUT, text)
        if isinstance(error, FailSample):
            return _HookFailedError(error.reason, f"{where}: {_one_line(error)}")
        reason = StopReason.HOOK_ERROR if kind == "generate" else StopReason.REWARD_ERROR
        return _HookFailedError(reason, f"{where}: {told(error)}{user_place(error)}")

    def watching(self, what: str, total: int) -> AbstractContextManager[None]:
        """In the block, tell how far it is, of long waits, and of hooks that block the event loop (`Watch`).

        `what`, such as "step 3", has `total` trajectories.
        """
        return self._watch.over(what, total)

    def note_taken(self) -> None:
        """A trajectory is there without that a hook ran."""
        self._watch.finished += 1


class _HookFailedError(Exception):
    """A hook failed; holds what its sample is to be finished with."""

    def __init__(self, reason: StopReason | str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _cause(error: BaseException) -> BaseException:
    """The error itself, or the most telling one of a group, such as an asyncio.TaskGroup in a hook raises."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [_cause(inner) for inner in error.exceptions]
    told = [cause for kind in (StopRunError, FailSample) for cause in causes if isinstance(cause, kind)]
    return (told or causes)[0]


def _checked(returned: Any, longest: int | None) -> Sample:
    """What a generate hook returned, if it is a finished sample with a valid trace of at most `longest` tokens.

    Raises ValueError if it is not.
    """
    if not isinstance(returned, Sample):
        raise ValueError(f"expected the finished Sample, found {type(returned).__name__}; end with `return sample`")
    if returned.status is SampleStatus.PENDING:
        raise ValueError("expected a finished sample, found one that is still PENDING; call sample.finish(...)")
    if returned.stop_reason is None:
        raise ValueError("expected a finished sample, found one without a reason; call sample.finish(...)")
    if not isinstance(returned.status, SampleStatus):
        raise ValueError(f"expected a SampleStatus as status, found {returned.status!r:.80}; call sample.finish(...)")
    check_reason(returned.stop_reason)
    _check_report(returned)
    if returned.status not in UNUSABLE:
        returned.trace.check(_vocab_size())
        _check_length(returned.trace, longest)
    return returned


def _check_length(trace: TokenTrace, longest: int | None) -> None:
    if longest is not None and len(trace) > longest:
        raise ValueError(
            f"expected a sample of at most {longest} tokens (--rollout-max-context-len), found {len(trace)} "
            f"({len(trace.prompt_ids)} of the prompt, {len(trace.response_ids)} of the response); end it when "
            "Conversation.room is used up, or raise the limit"
        )


def _check_report(sample: Sample) -> None:
    """ValueError if metadata or numbers are no longer what the metrics read, for a sample that was filled by hand."""
    if not isinstance(sample.metadata, dict):
        raise ValueError(
            f"expected the metadata of the row, found {sample.metadata!r:.80}; leave it unchanged and report your "
            "own values with sample.report(...)"
        )
    for name, value in sample.rollout_metrics.items():
        if not isinstance(value, Real):
            raise ValueError(
                f"expected numbers in rollout_metrics, found {value!r:.80} ({type(value).__name__}) as {name}; use "
                "sample.report(...)"
            )


def _vocab_size() -> int | None:
    try:
        return rollout_context().vocab_size
    except LookupError:  # a hook that needs no engine may run without one
        return None


def _name(hook: Any) -> str:
    return f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', type(hook).__name__)}"


def told(error: BaseException) -> str:
    """`ValueError: message` on one line, the type alone for an error that says nothing."""
    return f"{type(error).__name__}: {_one_line(error)}".removesuffix(": ")


def _one_line(error: BaseException) -> str:
    try:
        text = redact(" ".join(str(error).split()))
    except Exception:  # aiohttp's errors, made without a request, cannot be written
        return "its text cannot be made"
    return shortened(text, LONGEST_MESSAGE)
