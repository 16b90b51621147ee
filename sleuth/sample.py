"""A trajectory and its tokens: the words that hooks, rollout and trainer share.

Token ids are the truth here; text is only a view of them. Nothing in this module knows of
engines, trainers or search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal


class SampleStatus(StrEnum):
    """Where a sample stands."""

    PENDING = "pending"
    """Not generated yet, or still being generated."""
    COMPLETED = "completed"
    """The trajectory ended of its own accord: an answer, or the model's end of turn."""
    TRUNCATED = "truncated"
    """A budget (turns, response tokens, context, invalid actions) ended it; it is trained on."""
    ABORTED = "aborted"
    """The engine gave up on it; it is not trained on."""
    FAILED = "failed"
    """The environment (a search) failed; it is not trained on but replaced."""


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
    SEARCH_FAILED = "search_failed"
    """A search failed after its retries."""
    ENGINE_ABORT = "engine_abort"
    """The engine aborted the request."""


Source = Literal["model", "observation", "correction"]
MAX_LOG_PROB = 1e-3
"""Above 0 by rounding only, in nats."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of response tokens `[start, end)` with one source."""

    source: Source
    start: int
    end: int


@dataclass(slots=True)
class TokenTrace:
    """The one accumulator of a trajectory; its lists are equally long by construction.

    `prompt_ids` holds the prompt; the other lists hold the response, one entry a token:
    the id, the loss mask (1 exactly on what the model generated) and the log-probability in nats
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
        if log_probs and not (math.isfinite(sum(log_probs)) and max(log_probs) <= MAX_LOG_PROB):
            for position, value in enumerate(log_probs):
                if not -math.inf < value <= MAX_LOG_PROB:
                    raise ValueError(f"expected log-probabilities <= 0, found {value} at token {position} of a turn")
        self._append("model", ids, 1, log_probs)

    def append_observation(self, ids: Sequence[int], source: Source = "observation") -> None:
        """Append text of the environment, already encoded; it is never trained on."""
        self._append(source, ids, 0, [0.0] * len(ids))

    def _append(self, source: Source, ids: Sequence[int], mask: int, log_probs: Sequence[float]) -> None:
        if not ids:
            return
        start = len(self.response_ids)
        self.response_ids.extend(ids)
        self.loss_mask.extend([mask] * len(ids))
        self.log_probs.extend(log_probs)
        self.segments.append(Segment(source, start, len(self.response_ids)))


@dataclass(slots=True)
class Sample:
    """One trajectory, from its prompt to its reward.

    `file` and `row` say where its prompt stands in the data (rows count from 0).
    `rollout_metrics` are numbers the generate hook reports (for example `searches`); the rollout
    averages each over a step as `rollout/<name>`. `weight_version` is the policy's version that
    generated the last turn. `notes` are what else the hooks report, for people who read trajectories.
    """

    index: int
    group_index: int
    prompt: str | list[dict[str, Any]]
    trace: TokenTrace
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    status: SampleStatus = SampleStatus.PENDING
    stop_reason: StopReason | None = None
    reward: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    rollout_metrics: dict[str, float] = field(default_factory=dict)
    weight_version: str | None = None
    error: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    file: str | None = None
    row: int | None = None

    def finish(self, status: SampleStatus, reason: StopReason, error: str | None = None) -> Sample:
        """Set how the trajectory ended, and return the sample."""
        self.status, self.stop_reason, self.error = status, reason, error
        return self


@dataclass(slots=True)
class TrainSample:
    """What the trainer gets of one trajectory.

    `token_ids` [T]: prompt and response. The other lists are [R], one entry for each of the last
    R = T - prompt_length tokens: `loss_mask` (0 or 1; any weight >= 0 in supervised training),
    `rollout_log_probs` (nats, from the engine; empty in supervised training) and `advantages`. `reward` and `index`,
    the sample's place in its step (group after group), are for trainers that make advantages themselves.
    """

    token_ids: list[int]
    prompt_length: int
    loss_mask: list[float]
    rollout_log_probs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    reward: float = 0.0
    index: int = -1

    def __post_init__(self) -> None:
        response = len(self.token_ids) - self.prompt_length
        if self.prompt_length < 1 or response < 0:
            raise ValueError(f"expected 1 <= prompt_length <= {len(self.token_ids)} tokens, found {self.prompt_length}")
        for name in ("loss_mask", "rollout_log_probs", "advantages"):
            length = len(getattr(self, name))
            if length != response and not (length == 0 and name != "loss_mask"):
                raise ValueError(f"expected {response} entries in {name}, one a response token, found {length}")
