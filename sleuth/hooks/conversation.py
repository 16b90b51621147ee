"""`Conversation`: the state of one trajectory between turns. The hook decides what is said; this does the bookkeeping.

    async def generate(args, sample, sampling_params):
        conversation = Conversation(args, sample, sampling_params, stop=["</calc>"])
        while turn := await conversation.turn():
            call = CALL.search(turn.text)
            if call is None:
                return conversation.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)
            if not conversation.observe(f"<result>{calculate(call)}</result>"):
                break
        return sample

It counts tokens against the budgets, merges stop strings, keeps ids, masks and log-probabilities equally long, records
the version of the weights and the seconds, and finishes the sample when a budget is used up or the engine aborts.
"""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sleuth.hooks.context import Generation, rollout_context
from sleuth.sample import Sample, SampleStatus, Source, StopReason, check_ids
from sleuth.tokens import decode, encode, has_more_tokens

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation of the model.

    If a stop string ended the turn, `text` ends right after it, and `ids` hold the whole token in which it ended.
    `limit`: the budget that cut the turn, RESPONSE_LIMIT or CONTEXT_LIMIT; None if the turn ended by itself.
    """

    ids: list[int]
    text: str
    limit: StopReason | None
    seconds: float


class Conversation:
    """The state of one trajectory.

    `stop`: the hook's stop strings, in addition to those of `sampling_params`. A turn has at most `max_new_tokens`
    tokens, the whole trajectory at most `args.rollout_max_context_len` [the tokenizer's limit], and at most `timeout`
    seconds [no limit]. Raises ValueError for a sample that already has a response.
    """

    def __init__(
        self,
        args: Any,
        sample: Sample,
        sampling_params: dict[str, Any],
        *,
        stop: Sequence[str] = (),
        timeout: float | None = None,
    ) -> None:
        if sample.trace.response_ids:
            raise ValueError(
                f"sample {sample.index} has {len(sample.trace.response_ids)} response tokens already: "
                "partial rollouts are not supported; start from the prompt"
            )
        context = rollout_context()
        self.sample, self.trace = sample, sample.trace
        self.engine, self.tokenizer, self.vocab_size = context.engine, context.tokenizer, context.vocab_size
        self.max_tokens: int = getattr(args, "rollout_max_context_len", None) or self.tokenizer.model_max_length
        self.params = {**sampling_params, "stop": _joined(sampling_params.get("stop"), stop)}
        self.turns = 0
        self.generation_seconds = 0.0
        self._deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout

    @property
    def room(self) -> int:
        """How many more tokens fit into the context."""
        return self.max_tokens - len(self.trace)

    async def turn(self, *, keep_cut: bool = False) -> Turn | None:
        """Have the model generate once. Returns None if that finished the sample, which then has a status and a reason.

        An abort by the engine, a full context and the end of its time finish the sample, and so does a turn that a
        budget cut. With `keep_cut` such a turn is returned instead, and the caller decides; `turn.limit` says which
        budget cut it.
        """
        self._check_unfinished("generate")
        if self.room < 1:
            self._end(SampleStatus.TRUNCATED, StopReason.CONTEXT_LIMIT)
            return None
        allowed = min(self.params["max_new_tokens"], self.room)
        start = time.perf_counter()
        request = self.engine.generate(self.trace.token_ids, {**self.params, "max_new_tokens": allowed})
        generation = await self.wait_for(request)
        if generation is None:
            return None
        turn = Turn(generation.ids, generation.text, self._limit(generation, allowed), time.perf_counter() - start)
        self.trace.append_model(generation.ids, generation.log_probs)
        self.sample.weight_version = generation.weight_version
        self.turns += 1
        self.generation_seconds += turn.seconds
        if generation.finish_reason == "abort":
            self._end(SampleStatus.ABORTED, StopReason.ENGINE_ABORT, "the engine aborted a request")
        elif turn.limit is not None and not keep_cut:
            self._end(SampleStatus.TRUNCATED, turn.limit)
        return turn if self.sample.status is SampleStatus.PENDING else None

    async def wait_for(self, awaitable: Awaitable[T]) -> T | None:
        """What an environment's coroutine returns; None once the trajectory's time is over: the sample is finished."""
        clock = asyncio.timeout_at(self._deadline)
        try:
            async with clock:
                return await awaitable
        except TimeoutError:
            if not clock.expired():
                raise  # the environment's own
        self._end(SampleStatus.TRUNCATED, StopReason.TRAJECTORY_TIMEOUT)
        return None

    def _limit(self, generation: Generation, allowed: int) -> StopReason | None:
        """The budget that cut a generation of at most `allowed` tokens; None if none did."""
        if generation.finish_reason != "length":
            return None
        return StopReason.RESPONSE_LIMIT if allowed == self.params["max_new_tokens"] else StopReason.CONTEXT_LIMIT

    def observe(self, content: str | Sequence[int], source: Source = "observation") -> bool:
        """Append what the environment says, as text or ids; it is never trained on.

        Returns False, finishes the sample and appends nothing if no token would be left to generate. Raises ValueError
        for ids that the model has no embedding of.
        """
        self._check_unfinished("observe")
        if isinstance(content, str):  # megabytes need not be encoded to know that they do not fit
            too_long = has_more_tokens(content, self.room, self.tokenizer)
            ids = [] if too_long else encode(content, self.tokenizer).ids
        else:
            ids, too_long = list(map(operator.index, content)), False
        check_ids(ids, self.vocab_size)
        if too_long or len(ids) >= self.room:
            self._end(SampleStatus.TRUNCATED, StopReason.CONTEXT_LIMIT)
            return False
        self.trace.append_observation(ids, source)
        return True

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return decode(ids, self.tokenizer)

    def finish(self, status: SampleStatus, reason: StopReason | str, error: str | None = None) -> Sample:
        """End the trajectory. `reason` may be a word that the hook made up; it is counted as `rollout/stop/<reason>`.

        Raises ValueError if the trajectory is already finished.
        """
        self._end(status, reason, error)
        return self.sample

    def _end(self, status: SampleStatus, reason: StopReason | str, error: str | None = None) -> None:
        self.sample.finish(status, reason, error)
        self.sample.report(turns=self.turns, generation_seconds=self.generation_seconds)

    def _check_unfinished(self, what: str) -> None:
        if self.sample.status is not SampleStatus.PENDING:
            raise ValueError(
                f"sample {self.sample.index} is finished ({self.sample.status}, {self.sample.stop_reason}), so it can "
                f"{what} no more: return it once turn() gave None or observe() gave False"
            )


def _joined(given: str | Sequence[str] | None, own: Sequence[str]) -> list[str]:
    """The caller's stop strings and the hook's, each once."""
    return list(dict.fromkeys([*([given] if isinstance(given, str) else given or []), *own]))
