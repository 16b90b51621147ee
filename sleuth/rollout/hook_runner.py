"""Runs the user's hooks on one sample, within a time limit; a hook that fails costs only its own sample.

An exception in a hook makes the sample FAILED: the reason is counted, `sample.error` names the line of the hook, and
the traceback is logged. Only StopRunError is passed on: it ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from sleuth.arguments import Args
from sleuth.hooks import FailSample, StopRunError, accepts_evaluation, load_hook, rollout_context, single_turn
from sleuth.rollout.routing import one_trajectory
from sleuth.sample import Sample, SampleStatus, StopReason, TokenTrace, check_reason, shortened
from sleuth.secrets import redact

logger = logging.getLogger(__name__)

UNUSABLE = (SampleStatus.FAILED, SampleStatus.ABORTED)
QUIET_SECONDS = 30.0
"""After so long without a finished trajectory a line says how many are under way, and where the oldest waits."""
BLOCKED_SECONDS = 1.0
"""An event loop that does nothing else for so long is blocked by what it runs."""
LARGEST_REWARD = 1e6
"""A reward beyond it is told."""
LONGEST_MESSAGE = 1000
"""Characters of an exception's text that are kept; a sample's error also says where it was raised."""

Kind = Literal["generate", "reward"]


@dataclass(frozen=True, slots=True)
class Hooks:
    """The user's functions, already loaded, their signatures checked."""

    generate: Callable[..., Awaitable[Sample]]
    reward: Callable[..., Awaitable[float | dict[str, float]]]
    keep_group: Callable[[Args, list[Sample]], bool] | None = None


def load_hooks(args: Args) -> Hooks:
    """The hooks that the flags name; ValueError if one does not exist or has a wrong signature."""
    generate, keep = args.custom_generate_function_path, args.dynamic_sampling_filter_path
    return Hooks(
        generate=load_hook(generate, "generate") if generate else single_turn.generate,
        reward=load_hook(args.custom_rm_path, "reward"),
        keep_group=load_hook(keep, "filter") if keep else None,
    )


@dataclass(slots=True)
class _Call:
    """A hook that is under way."""

    kind: Kind
    sample: Sample
    task: asyncio.Task[Any] | None
    start: float


class HookRunner:
    """Runs generate and reward hooks, and keeps track of those under way."""

    def __init__(
        self, args: Args, hooks: Hooks, on_error: Callable[[Sample, BaseException], None] | None = None
    ) -> None:
        """`on_error` is called with what a hook raised, in addition to the log."""
        self.args, self.hooks, self._on_error = args, hooks, on_error
        self.finished = 0
        self._told_large = False
        self._takes_evaluation = accepts_evaluation(hooks.generate)
        self._calls: dict[int, _Call] = {}

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
        self.finished += 1
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
        call = _Call(kind, sample, asyncio.current_task(), time.monotonic())
        self._calls[id(call)] = call
        limit = asyncio.timeout(self.args.hook_timeout)
        try:
            async with limit:
                yield
        except (KeyboardInterrupt, GeneratorExit):
            raise  # of someone who wants an end
        except BaseException as error:  # some libraries' errors are no Exception
            if isinstance(error, asyncio.CancelledError) and call.task is not None and call.task.cancelling():
                raise  # the rollout ends; else the hook awaited something that others cancelled
            cause = _cause(error)
            if isinstance(cause, StopRunError):
                raise cause from None
            raise self._failure(kind, sample, cause, timed_out=limit.expired()) from None
        finally:
            del self._calls[id(call)]

    def _failure(self, kind: Kind, sample: Sample, error: BaseException, *, timed_out: bool) -> _HookFailedError:
        name = _name(self.hooks.generate if kind == "generate" else self.hooks.reward)
        where = f"{kind} hook {name}"
        logger.info("%s failed on sample %d (%s)", where, sample.index, sample.where, exc_info=error)
        if self._on_error is not None:
            self._on_error(sample, error)
        if timed_out:
            text = f"{where}: no result within --hook-timeout {self.args.hook_timeout:g} s{_place(error)}"
            return _HookFailedError(StopReason.HOOK_TIMEOUT, text)
        if isinstance(error, FailSample):
            return _HookFailedError(error.reason, f"{where}: {_one_line(error)}")
        reason = StopReason.HOOK_ERROR if kind == "generate" else StopReason.REWARD_ERROR
        return _HookFailedError(reason, f"{where}: {told(error)}{_place(error)}")

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """In the block, log a line whenever nothing has finished for a while.

        A thread does it: a hook that blocks the event loop would keep a task from telling so.
        """
        done = threading.Event()
        loop, thread = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(target=self._watch, args=(done, loop, thread), daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _watch(self, done: threading.Event, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        seen = self.finished
        while not done.wait(QUIET_SECONDS):
            calls = list(self._calls.values())
            if self.finished == seen and calls:
                blocked = _blocked_at(loop, thread)
                if not done.is_set():
                    logger.warning(self._describe(calls, blocked))
            seen = self.finished

    def _describe(self, calls: list[_Call], blocked: str | None) -> str:
        """A sentence that says how many trajectories are under way, and where the oldest one waits."""
        oldest = min(calls, key=lambda call: call.start)
        seconds = time.monotonic() - oldest.start
        text = (
            f"{self.finished} trajectories finished, {len(calls)} under way; the oldest, sample "
            f"{oldest.sample.index} ({oldest.sample.where}), is in the {oldest.kind} hook for {seconds:.0f} s"
        )
        if blocked is None:
            return f"{text}, at {_waits_at(oldest.task)}"
        return (
            f"{text}; all of them wait for {blocked}, which blocks the event loop, so that --hook-timeout cannot end "
            "it: use an async library there, or await asyncio.to_thread(...)"
        )


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


def _place(error: BaseException) -> str:
    """The innermost line of the user's own code, as in ` (my_hook.py:12)`; empty if there is none."""
    frames = _user_frames(error)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def user_traceback(error: BaseException) -> str:
    """A traceback of the error that shows only lines of the user's own code."""
    return "".join([*traceback.format_list(_user_frames(error)), *traceback.format_exception_only(error)])


def _user_frames(error: BaseException | None) -> list[traceback.FrameSummary]:
    """The frames of the user's own code, outermost first; if the error has none, those of the error that caused it."""
    while error is not None:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
        if frames:
            return frames
        error = error.__cause__ or error.__context__
    return []


_OURS = f"{Path(__file__).resolve().parent.parent}{os.sep}"
_LIBRARIES = tuple({sys.prefix, sys.base_prefix})


def _is_users(filename: str) -> bool:
    return not filename.startswith(("<", _OURS)) and "site-packages" not in filename and not _is_standard(filename)


def _is_standard(filename: str) -> bool:
    return filename.startswith(tuple(f"{prefix}/lib" for prefix in _LIBRARIES))


def _blocked_at(loop: asyncio.AbstractEventLoop, thread: int) -> str | None:
    """The line of the user's own code that keeps an event loop, which runs in `thread`, from all else; None if none."""
    alive = threading.Event()
    try:
        loop.call_soon_threadsafe(alive.set)
    except RuntimeError:  # closed
        return None
    frame = None if alive.wait(BLOCKED_SECONDS) else sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame else []
    places = [entry for entry in stack if _is_users(entry.filename)] or stack
    return f"{Path(places[-1].filename).name}:{places[-1].lineno} in {places[-1].name}" if places else None


def _waits_at(task: asyncio.Task[Any] | None) -> str:
    """The innermost line of the user's own code at which a task waits, as in `my_hook.py:12 in judge`."""
    awaited: Any = task.get_coro() if task is not None else None
    places = []
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None:
            places.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    chosen = [place for place in places if _is_users(place[0])] or places
    if not chosen:
        return "an unknown place"
    filename, line, function = chosen[-1]
    return f"{Path(filename).name}:{line} in {function}"
