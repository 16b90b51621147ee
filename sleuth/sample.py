"""A trajectory and its tokens: the data types that hooks, rollout and trainer share.

Token ids are the truth here; text is only a view of them. Nothing in this module knows
engines, trainers or search.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, Literal


class SampleStatus(StrEnum):
    """The state of a sample."""

    PENDING = "pending"
    """Not generated yet, or still being generated."""
    COMPLETED = "completed"
    """The trajectory ended of its own accord: an answer, or the model's end of turn."""
    TRUNCATED = "truncated"
    """A budget (turns, response tokens, context, invalid actions) ended it; it is trained on."""
    ABORTED = "aborted"
    """The engine gave up on it; it is not trained on but replaced."""
    FAILED = "failed"
    """A hook or the environment (a search) failed; it is not trained on but replaced."""


class StopReason(StrEnum):
    """Why a trajectory ended. Each is counted as the metric `rollout/stop/<value>`."""

    ANSWERED = "answered"
    """The model gave an answer."""
    ENDED = "ended"
    """The model ended its turn without an action, where the protocol allows that."""
    TURN_LIMIT = "turn_limit"
    """The last generation after `max_turns` search rounds held no answer."""
    RESPONSE_LIMIT = "response_limit"
    """A turn reached `--rollout-max-response-len` tokens."""
    CONTEXT_LIMIT = "context_limit"
    """`--rollout-max-context-len` left no token to generate."""
    INVALID_ACTION_LIMIT = "invalid_action_limit"
    """The model made more than `max_invalid_actions` invalid actions."""
    TRAJECTORY_TIMEOUT = "trajectory_timeout"
    """The trajectory took longer than `trajectory_timeout`; what was not finished then is not in it."""
    SEARCH_FAILED = "search_failed"
    """A search failed after its retries."""
    ENGINE_ABORT = "engine_abort"
    """The engine aborted the request."""
    HOOK_ERROR = "hook_error"
    """The generate hook raised an error, or did not return a finished sample."""
    REWARD_ERROR = "reward_error"
    """The reward hook raised an error, or did not return a reward."""
    HOOK_TIMEOUT = "hook_timeout"
    """The generate or the reward hook took longer than `--hook-timeout`."""


OWN_REASON = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""The form of a reason that a hook may make up."""

Source = Literal["model", "observation", "correction"]
LONGEST_ERROR = 2000
"""Characters of a sample's error that are kept: some quote a whole page."""
MAX_LOG_PROB = 1e-3
"""In nats: a log-probability up to this value is above 0 only by rounding."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of response tokens `[start, end)` with one source."""

    source: Source
    start: int
    end: int


@dataclass(slots=True)
class TokenTrace:
    """Collects the tokens of a trajectory; its methods keep the lists of the response equally long.

    `prompt_ids` holds the prompt. The other lists hold the response, with one entry for each token:
    its id, its loss mask (1 exactly where the model generated it) and its log-probability in nats
    (0.0 where the mask is 0).
    """

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response: what the next engine request carries and the trainer trains on."""
        return self.prompt_ids + self.response_ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def append_model(self, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Append one generation of the model.

        Raises ValueError if the lengths differ or a log-probability is NaN, infinite or positive
        beyond rounding: such a token must never reach the trainer.
        """
        if len(ids) != len(log_probs):
            raise ValueError(f"expected one log-probability a token, found {len(log_probs)} for {len(ids)} tokens")
        if len(log_probs) and not (math.isfinite(sum(log_probs)) and max(log_probs) <= MAX_LOG_PROB):
            for position, value in enumerate(log_probs):
                if not -math.inf < value <= MAX_LOG_PROB:
                    raise ValueError(f"expected log-probabilities <= 0, found {value} at token {position} of a turn")
        self._append("model", ids, 1, log_probs)

    def append_observation(self, ids: Sequence[int], source: Source = "observation") -> None:
        """Append text of the environment, already encoded; it is never trained on."""
        self._append(source, ids, 0, [0.0] * len(ids))

    def _append(self, source: Source, ids: Sequence[int], mask: int, log_probs: Sequence[float]) -> None:
        if len(ids) == 0:
            return
        start = len(self.response_ids)
        self.response_ids.extend(map(operator.index, ids))  # numpy's and torch's numbers are none that JSON knows
        self.loss_mask.extend([mask] * len(ids))
        self.log_probs.extend(map(float, log_probs))
        self.segments.append(Segment(source, start, len(self.response_ids)))

    def check(self, vocab_size: int | None = None) -> None:
        """ValueError unless the trace is as its own methods leave it, for one that was filled by hand.

        Lists are equally long, masks 0 or 1, log-probabilities finite and 0.0 where the mask is 0, segments cover the
        response in order, and ids are below `vocab_size`. Missing segments are made from the mask: model where it is 1,
        observation where it is 0.
        """
        length = len(self.response_ids)
        if not len(self.loss_mask) == len(self.log_probs) == length:
            raise ValueError(
                f"expected one loss mask and one log-probability for each of {length} response ids, found "
                f"{len(self.loss_mask)} and {len(self.log_probs)}; append with trace.append_model(ids, log_probs) and "
                "trace.append_observation(ids)"
            )
        for position, (mask, value) in enumerate(zip(self.loss_mask, self.log_probs, strict=True)):
            if mask not in (0, 1) or not -math.inf < value <= MAX_LOG_PROB or (mask == 0 and value != 0.0):
                raise ValueError(
                    f"response token {position}: expected mask 1 with a log-probability <= 0, or mask 0 with 0.0, "
                    f"found mask {mask} with {value}"
                )
        check_ids(self.response_ids, vocab_size)
        if not self.segments:
            self.segments.extend(_segments_of(self.loss_mask))
        self._check_segments()

    def _check_segments(self) -> None:
        position = 0
        for segment in self.segments:
            if segment.start != position or segment.end <= segment.start:
                break
            masks = set(self.loss_mask[segment.start : segment.end])
            if masks != {int(segment.source == "model")}:
                raise ValueError(
                    f"segment [{segment.start}, {segment.end}) of the {segment.source}: expected mask 1 exactly on "
                    f"what the model generated, found {sorted(masks)}"
                )
            position = segment.end
        if position != len(self.response_ids):
            raise ValueError(
                f"expected segments that cover the {len(self.response_ids)} response ids in order, found "
                f"{[(segment.start, segment.end) for segment in self.segments]}; leave them out to have them made"
            )


def check_ids(ids: Sequence[int], vocab_size: int | None, of: str = "the response") -> None:
    """ValueError for ids that are no whole numbers, or that the model has no embedding of; `of` says whose they are.

    `vocab_size`: how many embeddings the model has; None if that is not known.
    """
    for kind in set(map(type, ids)) - {int}:  # ids are many: look at each kind once
        if kind is bool or not issubclass(kind, Integral):
            wrong = next(token for token in ids if type(token) is kind)
            raise ValueError(f"expected whole numbers as ids, found {wrong!r:.40} ({kind.__name__}) in {of}")
    check_range(ids, vocab_size, of)


def check_range(ids: Sequence[int], vocab_size: int | None, of: str) -> None:
    """The second half of `check_ids`, for ids that were whole numbers when they were appended."""
    if not ids or vocab_size is None:
        return
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(
            f"expected ids in [0, {vocab_size}), the rows of the model's embedding, found {wrong} in {of}, at "
            f"position {list(ids).index(wrong)}; is the tokenizer the one of the model?"
        )


def _segments_of(loss_mask: Sequence[int]) -> Iterator[Segment]:
    start = 0
    for mask, run in itertools.groupby(loss_mask):
        end = start + len(list(run))
        yield Segment("model" if mask else "observation", start, end)
        start = end


@dataclass(slots=True)
class Sample:
    """One trajectory, from its prompt to its reward.

    `metadata` belongs to the row, and hooks leave it unchanged. A hook reports its own numbers and notes by `report`,
    which puts numbers into `rollout_metrics` and everything else into `notes`. `weight_version` is the version of the
    weights that generated the last turn. `stop_reason` is a StopReason, or a word that the hook made up. `file` and
    `row` say where the prompt comes from (rows count from 0).
    """

    index: int
    group_index: int
    prompt: str | list[dict[str, Any]]
    trace: TokenTrace
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    status: SampleStatus = SampleStatus.PENDING
    stop_reason: StopReason | str | None = None
    reward: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    rollout_metrics: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    weight_version: str | None = None
    error: str | None = None
    file: str | None = None
    row: int | None = None

    @property
    def where(self) -> str:
        """Where the prompt comes from: `row 17 of train.parquet`, or the sample's place in the step."""
        return f"row {self.row} of {self.file}" if self.file is not None else f"prompt {self.group_index}"

    def finish(self, status: SampleStatus, reason: StopReason | str, error: str | None = None) -> Sample:
        """Set how the trajectory ended, and return the sample.

        `reason` may be a word that the hook made up (lower-case letters, digits, `_`); it is counted as
        `rollout/stop/<reason>`. Raises ValueError for any other text, and for a sample that is already finished.
        """
        if self.status is not SampleStatus.PENDING:
            raise ValueError(
                f"sample {self.index} is finished already ({self.status}, {self.stop_reason}), so it cannot become "
                f"{status} ({reason}); finish a sample once"
            )
        if status is SampleStatus.PENDING:
            raise ValueError("expected how the trajectory ended, found PENDING; see SampleStatus")
        self.status, self.stop_reason = SampleStatus(status), check_reason(reason)
        self.error = error if error is None else shortened(error, LONGEST_ERROR)
        return self

    def report(self, **values: Any) -> None:
        """Report a hook's own numbers and notes.

        Numbers are averaged over a step's samples, as the metric `rollout/<name>`; everything else is written into the
        logged trajectory. Reporting a name again replaces its value.
        """
        for name, value in values.items():
            is_number = isinstance(value, Real)  # numpy's are, too
            (self.rollout_metrics if is_number else self.notes)[name] = float(value) if is_number else value

    def set_reward(self, result: float | Mapping[str, float]) -> None:
        """Store a reward hook's result: a number, or a mapping of components in which `reward` is the total.

        Raises ValueError for anything else, and says what was found.
        """
        components = result if isinstance(result, Mapping) else {"reward": result}
        if "reward" not in components:
            raise ValueError(
                f"expected the total as 'reward' among the components, found {sorted(map(str, components))}"
            )
        for name, value in components.items():
            if not _is_finite_number(value):
                found = f"{value!r:.80} ({type(value).__name__})" + (f" as {name}" if components is result else "")
                raise ValueError(f"expected a finite number or a dictionary of finite numbers, found {found}")
        self.reward = float(components["reward"])
        self.reward_components = {str(name): float(value) for name, value in components.items() if name != "reward"}


def shortened(text: str, limit: int) -> str:
    """The text, or its first `limit` characters and how many it had."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _is_finite_number(value: Any) -> bool:
    """Whether `float()` accepts the value and gives a finite number; text never counts. Accepts numpy and tensors."""
    if isinstance(value, str | bytes):
        return False
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError, RuntimeError):
        return False


def check_reason(reason: StopReason | str) -> StopReason | str:
    """The reason, as a member of StopReason if it is one; ValueError if it is not of the form OWN_REASON."""
    if not isinstance(reason, str) or not OWN_REASON.fullmatch(reason):
        raise ValueError(
            f"expected a StopReason, or a word of small letters, digits and _ as a reason of your own, found {reason!r}"
        )
    return StopReason(reason) if reason in set(StopReason) else reason


@dataclass(slots=True)
class TrainSample:
    """The part of one trajectory that the trainer gets.

    `token_ids` [T]: prompt and response. The other lists are [R], one entry for each of the last
    R = T - prompt_length tokens: `loss_mask` (0 or 1; any weight >= 0 in supervised training),
    `rollout_log_probs` (nats, from the engine; empty in supervised training) and `advantages`. `reward` and `index`
    (the sample's place in its step, group after group) are for a trainer that computes advantages itself. `logged`: the
    trajectory is written down, so the trainer hands back its log-probabilities.
    """

    token_ids: list[int]
    prompt_length: int
    loss_mask: list[float]
    rollout_log_probs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    reward: float = 0.0
    index: int = -1
    logged: bool = False

    def __post_init__(self) -> None:
        response = len(self.token_ids) - self.prompt_length
        if self.prompt_length < 1 or response < 0:
            raise ValueError(f"expected 1 <= prompt_length <= {len(self.token_ids)} tokens, found {self.prompt_length}")
        for name in ("loss_mask", "rollout_log_probs", "advantages"):
            length = len(getattr(self, name))
            if length != response and not (length == 0 and name != "loss_mask"):
                raise ValueError(f"expected {response} entries in {name}, one a response token, found {length}")
