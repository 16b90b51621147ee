"""The generation loop: many trajectories in flight, failed ones replaced, groups kept in order.

It knows the hooks and the engine's protocol, but not Ray and not Megatron. Concurrency is not bounded here, but by
the clients of the scarce resources: the engine client and the hook's search client.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from sleuth.arguments import Args
from sleuth.data import PromptRow
from sleuth.metrics.progress import Report
from sleuth.metrics.rollout_metrics import SECONDS
from sleuth.rollout.hook_runner import UNUSABLE, HookRunner, Hooks, told
from sleuth.sample import LONGEST_ERROR, Sample, StopReason, TokenTrace, shortened

logger = logging.getLogger(__name__)

MAX_FILTERED_RATIO = 30
"""Rejected groups per wanted group at which a step is given up: the prompts are endless, patience is not."""


class RolloutError(RuntimeError):
    """So many trajectories of a step failed that the step would be meaningless."""


class FinishedSamples(Protocol):
    """Keeps finished samples, so that a rollout that was interrupted need not make them again."""

    def take(self, new: Sample) -> Sample | None:
        """The finished sample in the place of `new`; None if it has to be generated."""

    async def record(self, sample: Sample, entry: bytes | None = None) -> None:
        """Keep a finished and scored sample; `entry` is its entry in the journal, where somebody has made it."""


class Workers(Protocol):
    """Other processes that run the hooks in place of this one."""

    async def run(self, sample: Sample, params: dict[str, Any], evaluation: bool) -> tuple[Sample, bytes | None]:
        """As `HookRunner.run`, on a copy of the sample; beside it its entry in the journal, if the run has one."""

    def watching(self, what: str, total: int) -> AbstractContextManager[None]:
        """As `HookRunner.watching`."""

    def note_taken(self) -> None:
        """As `HookRunner.note_taken`."""


@dataclass(slots=True)
class FailureBudget:
    """Collects the failed trajectories of a step, and stops the step when there are too many."""

    allowed: int
    failed: list[Sample] = field(default_factory=list)
    on_failure: Callable[[Sample], None] | None = None

    def record(self, sample: Sample) -> None:
        if sample.error is not None:  # a hook may have set it by itself
            sample.error = shortened(sample.error, LONGEST_ERROR)
        self.failed.append(sample)
        if self.on_failure is not None:
            self.on_failure(sample)
        logger.warning(
            "sample %d (%s): %s (%s): %s", sample.index, sample.where, sample.status, sample.stop_reason, sample.error
        )
        if len(self.failed) > self.allowed:
            raise RolloutError(
                f"{len(self.failed)} trajectories of this step failed; --max-failure-rate allows {self.allowed}. "
                f"The last one, sample {sample.index} ({sample.where}): {sample.stop_reason}: {sample.error}. "
                f"{_remedy(sample)}, then start again"
            )


def _remedy(sample: Sample) -> str:
    if sample.stop_reason in (StopReason.SEARCH_FAILED, StopReason.ENGINE_ABORT):
        return "Check that the search backend and the engines answer"
    if sample.stop_reason is StopReason.HOOK_TIMEOUT:
        return "Check what the hook waits for, or raise --hook-timeout"
    return "Mend the hook (tracebacks: logs/rollout*.log in the run's folder)"


@dataclass(slots=True)
class Rollout:
    """The kept groups of a step or an evaluation, in the order of the prompt data, and what was dropped."""

    groups: list[list[Sample]] = field(default_factory=list)
    failed: list[Sample] = field(default_factory=list)
    filtered_groups: int = 0

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group]


def sampling_parameters(args: Args, *, temperature: float, top_p: float, max_new_tokens: int) -> dict[str, Any]:
    """The `sampling_params` that a generate hook gets."""
    return {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": args.rollout_top_k if temperature > 0 else -1,
        "max_new_tokens": max_new_tokens,
        "stop": list(args.rollout_stop),
    }


def rollout_parameters(args: Args) -> dict[str, Any]:
    """The `sampling_params` of rollouts, which are trained on."""
    return sampling_parameters(
        args,
        temperature=args.rollout_temperature,
        top_p=args.rollout_top_p,
        max_new_tokens=args.rollout_max_response_len,
    )


class GenerationLoop:
    """Runs the hooks over rows of prompt data; use it inside `use_rollout_context(...)`."""

    def __init__(self, args: Args, hooks: Hooks, report: Report | None = None, workers: Workers | None = None) -> None:
        """`report` is told every second how far it is. Without `workers`, hooks run in this process, and it reports."""
        self.args = args
        self.hooks = hooks
        self._workers: Workers = workers or _ThisProcess(HookRunner(args, hooks, report=report))

    async def rollout(
        self,
        next_rows: Callable[[int], Sequence[PromptRow]],
        journal: FinishedSamples | None = None,
        what: str = "rollout",
    ) -> Rollout:
        """Generate and score `rollout_batch_size` groups; `next_rows(n)` gives the next prompts.

        A failed trajectory is generated anew. A group that the filter rejects is replaced by the
        next prompt. Samples that the journal has are taken from it, and the others written to it.
        Raises RolloutError when more than `--max-failure-rate` of a step's trajectories fail, or
        the filter keeps next to nothing. `what`, such as "step 3", is told in lines about long waits.
        """
        args = self.args
        params = rollout_parameters(args)
        budget = self._budget(args.rollout_batch_size * args.n_samples_per_prompt)
        rollout = Rollout()
        group_indices = itertools.count()
        while missing := args.rollout_batch_size - len(rollout.groups):
            groups = [_group(row, next(group_indices), args.n_samples_per_prompt) for row in next_rows(missing)]
            known = (
                f", {len(rollout.groups)} of {args.rollout_batch_size} groups kept" if rollout.filtered_groups else ""
            )
            for group in await self._run_groups(groups, params, budget, what + known, journal=journal):
                if self._keeps(group):
                    rollout.groups.append(group)
                else:
                    rollout.filtered_groups += 1
            if rollout.filtered_groups > MAX_FILTERED_RATIO * args.rollout_batch_size:
                raise RolloutError(
                    f"--dynamic-sampling-filter-path rejected {rollout.filtered_groups} groups and kept "
                    f"{len(rollout.groups)} of {args.rollout_batch_size}: the prompts are all too easy or too hard "
                    "for this model, or the filter is wrong"
                )
        rollout.failed = budget.failed
        return rollout

    async def evaluate(
        self,
        rows: Iterable[PromptRow],
        temperature: float,
        what: str = "evaluation",
        *,
        journal: FinishedSamples | None = None,
        at_once: int | None = None,
        on_failure: Callable[[Sample], None] | None = None,
    ) -> Rollout:
        """Generate and score each row `n_samples_per_eval_prompt` times; returns one group for each row, in order.

        A failed trajectory is given to `on_failure` and generated anew, as in `rollout`. At most `at_once` trajectories
        [all] are under way.
        """
        args = self.args
        params = sampling_parameters(
            args,
            temperature=temperature,
            top_p=args.eval_top_p,
            max_new_tokens=args.eval_max_response_len or args.rollout_max_response_len,
        )
        groups = [_group(row, i, args.n_samples_per_eval_prompt) for i, row in enumerate(rows)]
        budget = self._budget(sum(map(len, groups)))
        budget.on_failure = on_failure
        done = await self._run_groups(groups, params, budget, what, evaluation=True, journal=journal, at_once=at_once)
        return Rollout(done, budget.failed)

    def _keeps(self, group: list[Sample]) -> bool:
        try:
            return self.hooks.keep_group is None or bool(self.hooks.keep_group(self.args, group))
        except Exception as error:
            logger.info("the filter failed", exc_info=error)
            raise RolloutError(
                f"--dynamic-sampling-filter-path {self.args.dynamic_sampling_filter_path} failed on prompt "
                f"{group[0].group_index} ({group[0].where}): {told(error)}; mend the filter "
                "(traceback: logs/rollout.log in the run's folder)"
            ) from None

    def _budget(self, samples: int) -> FailureBudget:
        return FailureBudget(math.ceil(self.args.max_failure_rate * samples))

    async def _run_groups(
        self,
        groups: list[list[NewSample]],
        params: dict[str, Any],
        budget: FailureBudget,
        what: str,
        *,
        evaluation: bool = False,
        journal: FinishedSamples | None = None,
        at_once: int | None = None,
    ) -> list[list[Sample]]:
        places = nullcontext() if at_once is None else asyncio.Semaphore(at_once)

        async def run(new_sample: NewSample) -> Sample:
            if journal is not None and (recorded := journal.take(new_sample())) is not None:
                self._workers.note_taken()
                return recorded
            async with places:
                sample, entry = await self._run_until_usable(new_sample, params, budget, evaluation)
            if journal is not None:
                await journal.record(sample, entry)
            return sample

        try:
            with self._workers.watching(what, sum(map(len, groups))):
                async with asyncio.TaskGroup() as tasks:
                    running = [[tasks.create_task(run(new_sample)) for new_sample in group] for group in groups]
        except BaseExceptionGroup as errors:
            # Raise only the first error: the other tasks were cancelled because of it.
            raise portable(next(_leaves(errors))) from None
        return [[task.result() for task in group] for group in running]

    async def _run_until_usable(
        self, new_sample: NewSample, params: dict[str, Any], budget: FailureBudget, evaluation: bool
    ) -> tuple[Sample, bytes | None]:
        while True:
            start = time.perf_counter()
            done, entry = await self._workers.run(new_sample(), params, evaluation)
            if done.status not in UNUSABLE:
                if evaluation:
                    done.rollout_metrics[SECONDS] = time.perf_counter() - start
                return done, entry
            budget.record(done)


@dataclass(frozen=True, slots=True)
class _ThisProcess:
    """The hooks run here, beside all else."""

    runner: HookRunner

    async def run(self, sample: Sample, params: dict[str, Any], evaluation: bool) -> tuple[Sample, None]:
        return await self.runner.run(sample, params, evaluation), None

    def watching(self, what: str, total: int) -> AbstractContextManager[None]:
        return self.runner.watching(what, total)

    def note_taken(self) -> None:
        self.runner.note_taken()


Failure = TypeVar("Failure", bound=BaseException)
NewSample = Callable[[], Sample]
"""Makes the same unstarted sample each time: a failed trajectory starts over from it."""


def _group(row: PromptRow, group_index: int, size: int) -> list[NewSample]:
    return [partial(fresh_sample, row, group_index, group_index * size + i) for i in range(size)]


def fresh_sample(row: PromptRow, group_index: int, index: int) -> Sample:
    """A new sample of a prompt, without a response."""
    return Sample(
        index=index,
        group_index=group_index,
        prompt=row.prompt,
        trace=TokenTrace(list(row.prompt_ids)),
        label=row.label,
        metadata=dict(row.metadata),
        file=row.file,
        row=row.index,
    )


def _leaves(errors: BaseExceptionGroup) -> Iterator[BaseException]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def portable(error: Failure) -> Failure | RolloutError:
    """The error itself if it can be pickled, else one with its text: errors of some libraries cannot."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RolloutError(told(error))
    return error
