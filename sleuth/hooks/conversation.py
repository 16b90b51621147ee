"""`Conversation`: one trajectory between turns. A hook decides what to say; this keeps the books.

    async def generate(args, sample, sampling_params):
        conversation = Conversation(args, sample, sampling_params, stop=["</calc>"])
        while turn := await conversation.turn():
            call = CALL.search(turn.text)
            if call is None:
                return conversation.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)
            if not conversation.observe(f"<result>{calculate(call)}</result>"):
                break
        return sample

It counts tokens against the budgets, merges stop strings, keeps ids, masks and log-probabilities in step, notes the
weights' version and the seconds, and finishes the sample where a budget or the engine ends it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sleuth.hooks.context import Generation, rollout_context
from sleuth.sample import Sample, SampleStatus, Source, StopReason, check_ids
from sleuth.tokens import decode, encode


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation of the model.

    `text` ends right after the stop string where one ended the turn; `ids` hold the whole token it ended in.
    `limit`: the budget that cut the turn, RESPONSE_LIMIT or CONTEXT_LIMIT; None where the turn ended by itself.
    """

    ids: list[int]
    text: str
    limit: StopReason | None
    seconds: float


class Conversation:
    """The state of one trajectory.

    `stop`: the hook's stop strings, beside those of `sampling_params`. A turn has at most `max_new_tokens` tokens, the
    whole trajectory at most `args.rollout_max_context_len` [the tokenizer's limit]. Raises ValueError for a sample that
    has a response already.
    """

    def __init__(self, args: Any, sample: Sample, sampling_params: dict[str, Any], *, stop: Sequence[str] = ()) -> None:
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

    @property
    def room(self) -> int:
        """Tokens that the context still holds."""
        return self.max_tokens - len(self.trace)

    async def turn(self, *, keep_cut: bool = False) -> Turn | None:
        """Let the model speak; None once the sample is finished, with its status and reason.

        The engine's abort and a full context finish it, and so does a turn that was cut by a budget, unless
        `keep_cut` leaves that to the caller, who finds the reason in `turn.limit`.
        """
        self._check_unfinished("generate")
        if self.room < 1:
            self._end(SampleStatus.TRUNCATED, StopReason.CONTEXT_LIMIT)
            return None
        allowed = min(self.params["max_new_tokens"], self.room)
        start = time.perf_counter()
        generation = await self.engine.generate(self.trace.token_ids, {**self.params, "max_new_tokens": allowed})
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

    def _limit(self, generation: Generation, allowed: int) -> StopReason | None:
        """The budget that cut a generation of `allowed` tokens, if one did."""
        if generation.finish_reason != "length":
            return None
        return StopReason.RESPONSE_LIMIT if allowed == self.params["max_new_tokens"] else StopReason.CONTEXT_LIMIT

    def observe(self, content: str | Sequence[int], source: Source = "observation") -> bool:
        """Append what the environment says, as text or ids; it is never trained on.

        False if it leaves no token to generate: the sample is then finished, and nothing was appended. Raises
        ValueError for ids that the model has no embedding of.
        """
        self._check_unfinished("observe")
        ids = encode(content, self.tokenizer).ids if isinstance(content, str) else list(content)
        check_ids(ids, self.vocab_size)
        if len(ids) >= self.room:
            self._end(SampleStatus.TRUNCATED, StopReason.CONTEXT_LIMIT)
            return False
        self.trace.append_observation(ids, source)
        return True

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of ids as they are, special tokens included."""
        return decode(ids, self.tokenizer)

    def finish(self, status: SampleStatus, reason: StopReason | str, error: str | None = None) -> Sample:
        """End the trajectory. `reason` may be a word of the hook's own, counted as `rollout/stop/<reason>`.

        Raises ValueError if it is finished already.
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
