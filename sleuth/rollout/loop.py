"""The generation loop: many trajectories in flight, failed ones replaced, groups kept in order.

It knows the hooks and the engine's protocol, not Ray, not Megatron. Concurrency is bounded where
the resource is: by the engine client and by the hook's search client, not here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sleuth.arguments import Args
from sleuth.data import PromptRow
from sleuth.hooks import accepts_evaluation, load_hook
from sleuth.rollout import single_turn
from sleuth.sample import Sample, SampleStatus, TokenTrace

logger = logging.getLogger(__name__)

MAX_FILTERED_RATIO = 30
"""Rejected groups per wanted group at which a step is given up: the prompts are endless, patience is not."""

UNUSABLE = (SampleStatus.FAILED, SampleStatus.ABORTED)


class RolloutError(RuntimeError):
    """Too many trajectories of a step failed for the step to mean anything."""


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
class FailureBudget:
    """Collects the failed trajectories of a step; the one that is too many stops it."""

    allowed: int
    failed: list[Sample] = field(default_factory=list)

    def record(self, sample: Sample) -> None:
        self.failed.append(sample)
        logger.warning("sample %d: %s (%s): %s", sample.index, sample.status, sample.stop_reason, sample.error)
        if len(self.failed) > self.allowed:
            raise RolloutError(
                f"{len(self.failed)} trajectories of this step failed; --max-failure-rate allows {self.allowed}. "
                f"The last one: {sample.stop_reason}: {sample.error}. "
                "Check that the search backend and the engines answer, then start again from the last checkpoint"
            )


@dataclass(slots=True)
class Rollout:
    """The kept groups of a step or an evaluation, in the order of the prompt data, and what was left out."""

    groups: list[list[Sample]] = field(default_factory=list)
    failed: list[Sample] = field(default_factory=list)
    filtered_groups: int = 0

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group]


def sampling_parameters(args: Args, *, temperature: float, top_p: float, max_new_tokens: int) -> dict[str, Any]:
    """Parameters of an engine request. The text keeps stop strings and special tokens."""
    return {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": args.rollout_top_k if temperature > 0 else -1,
        "max_new_tokens": max_new_tokens,
        "stop": list(args.rollout_stop),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }


class GenerationLoop:
    """Runs the hooks over rows of prompt data; use it inside `use_rollout_context(...)`."""

    def __init__(self, args: Args, hooks: Hooks) -> None:
        self.args = args
        self.hooks = hooks
        self._takes_evaluation = accepts_evaluation(hooks.generate)

    async def rollout(self, next_rows: Callable[[int], Sequence[PromptRow]]) -> Rollout:
        """Generate and score `rollout_batch_size` groups; `next_rows(n)` gives the next prompts.

        A failed trajectory is generated anew. A group that the filter rejects is replaced by the
        next prompt. Raises RolloutError when more than `--max-failure-rate` of a step's
        trajectories fail, or the filter keeps next to nothing.
        """
        args = self.args
        params = sampling_parameters(
            args,
            temperature=args.rollout_temperature,
            top_p=args.rollout_top_p,
            max_new_tokens=args.rollout_max_response_len,
        )
        budget = self._budget(args.rollout_batch_size * args.n_samples_per_prompt)
        rollout = Rollout()
        group_indices = itertools.count()
        while missing := args.rollout_batch_size - len(rollout.groups):
            groups = [_group(row, next(group_indices), args.n_samples_per_prompt) for row in next_rows(missing)]
            for group in await self._run_groups(groups, params, budget):
                if self.hooks.keep_group is None or self.hooks.keep_group(args, group):
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

    async def evaluate(self, rows: Iterable[PromptRow], temperature: float) -> Rollout:
        """Generate and score each row `n_samples_per_eval_prompt` times; a group a row, in the rows' order.

        A failed trajectory is generated anew, as in `rollout`.
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
        done = await self._run_groups(groups, params, budget, evaluation=True)
        return Rollout(done, budget.failed)

    def _budget(self, samples: int) -> FailureBudget:
        return FailureBudget(math.ceil(self.args.max_failure_rate * samples))

    async def _run_groups(
        self, groups: list[list[NewSample]], params: dict[str, Any], budget: FailureBudget, evaluation: bool = False
    ) -> list[list[Sample]]:
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    [
                        tasks.create_task(self._run_until_usable(new_sample, params, budget, evaluation))
                        for new_sample in group
                    ]
                    for group in groups
                ]
        except BaseExceptionGroup as errors:
            # One cause is what a reader needs; the other tasks were cancelled because of it.
            raise next(_leaves(errors)) from None
        return [[task.result() for task in group] for group in running]

    async def _run_until_usable(
        self, new_sample: NewSample, params: dict[str, Any], budget: FailureBudget, evaluation: bool
    ) -> Sample:
        while True:
            done = await self._run(new_sample(), params, evaluation)
            if done.status not in UNUSABLE:
                return done
            budget.record(done)

    async def _run(self, sample: Sample, params: dict[str, Any], evaluation: bool) -> Sample:
        extra = {"evaluation": evaluation} if self._takes_evaluation else {}
        sample = await self.hooks.generate(self.args, sample, dict(params), **extra)
        if sample.status is SampleStatus.PENDING:
            raise ValueError("the generate hook returned a sample that is still PENDING: call sample.finish(...)")
        if sample.status not in UNUSABLE:
            _set_reward(sample, await self.hooks.reward(self.args, sample))
        return sample


NewSample = Callable[[], Sample]
"""Makes the same unstarted sample each time: a failed trajectory starts over from it."""


def _group(row: PromptRow, group_index: int, size: int) -> list[NewSample]:
    return [partial(_new_sample, row, group_index, group_index * size + i) for i in range(size)]


def _new_sample(row: PromptRow, group_index: int, index: int) -> Sample:
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


def _set_reward(sample: Sample, result: float | dict[str, float]) -> None:
    """Store what the reward hook returned: a number, or components of which `reward` is the total."""
    if isinstance(result, dict):
        if "reward" not in result:
            raise ValueError(f"the reward hook's components need the total as 'reward'; found {sorted(result)}")
        sample.reward_components = {k: float(v) for k, v in result.items() if k != "reward"}
        result = result["reward"]
    sample.reward = float(result)
    if not math.isfinite(sample.reward):
        raise ValueError(f"the reward hook returned {result} for sample {sample.index}; expected a finite number")


def _leaves(errors: BaseExceptionGroup) -> Iterator[BaseException]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
