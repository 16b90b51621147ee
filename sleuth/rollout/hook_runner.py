"""Runs the user's hooks on one sample: bounded in time, and a hook that fails costs its own sample only.

An exception of a hook makes the sample FAILED, with a reason that is counted, the hook's line in `sample.error`, and
the traceback in the log. Only StopRunError goes through: it ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sleuth.arguments import Args
from sleuth.hooks import FailSample, StopRunError, accepts_evaluation, load_hook, rollout_context, single_turn
from sleuth.rollout.routing import one_trajectory
from sleuth.sample import Sample, SampleStatus, StopReason

logger = logging.getLogger(__name__)

UNUSABLE = (SampleStatus.FAILED, SampleStatus.ABORTED)
QUIET_SECONDS = 30.0
"""After so long without a finished trajectory a line says how many are under way, and where the oldest waits."""

Kind = Literal["generate", "reward"]


@dataclass(frozen=True, slots=True)
class Hooks:
    """The user's functions, already loaded and signature-checked."""

    generate: Callable[..., Awaitable[Sample]]
    reward: Callable[..., Awaitable[float | dict[str, float]]]
    keep_group: Callable[[Args, list[Sample]], bool] | None = None


def load_hooks(args: Args) -> Hooks:
    """The hooks that the flags name; ValueError for one that is not there or has another signature."""
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
    """Runs generate and reward hooks, and knows which are under way."""

    def __init__(
        self, args: Args, hooks: Hooks, on_error: Callable[[Sample, BaseException], None] | None = None
    ) -> None:
        """`on_error` is told what a hook raised, beside the log."""
        self.args, self.hooks, self._on_error = args, hooks, on_error
        self.finished = 0
        self._takes_evaluation = accepts_evaluation(hooks.generate)
        self._calls: dict[int, _Call] = {}

    async def run(self, sample: Sample, params: dict[str, Any], evaluation: bool) -> Sample:
        """The finished and scored sample; FAILED, with the reason, where a hook failed. StopRunError goes through."""
        extra = {"evaluation": evaluation} if self._takes_evaluation else {}
        try:
            async with self._call("generate", sample):
                with one_trajectory():
                    returned = await self.hooks.generate(self.args, sample, dict(params), **extra)
                sample = _checked(returned)
            if sample.status not in UNUSABLE:
                async with self._call("reward", sample):
                    sample.set_reward(await self.hooks.reward(self.args, sample))
        except _HookFailedError as failure:
            sample.status, sample.stop_reason, sample.error = SampleStatus.FAILED, failure.reason, str(failure)
        self.finished += 1
        return sample

    @asynccontextmanager
    async def _call(self, kind: Kind, sample: Sample) -> AsyncIterator[None]:
        """A hook under way: watched, bounded by `--hook-timeout`, its errors turned into a _HookFailedError."""
        call = _Call(kind, sample, asyncio.current_task(), time.monotonic())
        self._calls[id(call)] = call
        limit = asyncio.timeout(self.args.hook_timeout)
        try:
            async with limit:
                yield
        except StopRunError:
            raise
        except (Exception, SystemExit) as error:
            raise self._failure(kind, sample, error, timed_out=limit.expired()) from None
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
            return _HookFailedError(error.reason, f"{where}: {error}")
        reason = StopReason.HOOK_ERROR if kind == "generate" else StopReason.REWARD_ERROR
        return _HookFailedError(reason, f"{where}: {type(error).__name__}: {error}{_place(error)}")

    async def watch(self) -> None:
        """Tell, for as long as this runs, when nothing has finished for a while."""
        seen = self.finished
        while True:
            await asyncio.sleep(QUIET_SECONDS)
            if self.finished == seen and self._calls:
                logger.warning(self.describe())
            seen = self.finished

    def describe(self) -> str:
        """How many trajectories are under way, and where the oldest waits."""
        oldest = min(self._calls.values(), key=lambda call: call.start)
        seconds = time.monotonic() - oldest.start
        return (
            f"{self.finished} trajectories finished, {len(self._calls)} under way; the oldest, sample "
            f"{oldest.sample.index} ({oldest.sample.where}), is in the {oldest.kind} hook for {seconds:.0f} s, at "
            f"{_waits_at(oldest.task)}"
        )


class _HookFailedError(Exception):
    """What becomes of a sample whose hook failed."""

    def __init__(self, reason: StopReason | str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _checked(returned: Any) -> Sample:
    """What a generate hook returned, if it is a finished sample whose trace can be trained on; else ValueError."""
    if not isinstance(returned, Sample):
        raise ValueError(f"expected the finished Sample, found {type(returned).__name__}; end with `return sample`")
    if returned.status is SampleStatus.PENDING:
        raise ValueError("expected a finished sample, found one that is still PENDING; call sample.finish(...)")
    if returned.status not in UNUSABLE:
        returned.trace.check(_vocab_size())
    return returned


def _vocab_size() -> int | None:
    try:
        return rollout_context().vocab_size
    except LookupError:  # a hook that needs no engine may run without one
        return None


def _name(hook: Any) -> str:
    return f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', type(hook).__name__)}"


def _place(error: BaseException) -> str:
    """` (my_hook.py:12)`: the innermost line of the user's own code, as far as there is one."""
    frames = _user_frames(error)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def user_traceback(error: BaseException) -> str:
    """The error with the lines of the user's own code that led to it, as a traceback shows them."""
    return "".join([*traceback.format_list(_user_frames(error)), *traceback.format_exception_only(error)])


def _user_frames(error: BaseException | None) -> list[traceback.FrameSummary]:
    """Those of the user's own code, outermost first; of what the error came from where it has none itself."""
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


def _waits_at(task: asyncio.Task[Any] | None) -> str:
    """`my_hook.py:12 in judge`: the innermost line of the user's own code at which a task waits."""
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
