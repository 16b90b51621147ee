"""The sample that a hook written for slime reads and fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar


class SampleStatus(Enum):
    """How a sample stands."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """A trajectory. The last `response_length` of `tokens` are the response, which the other lists are as long as.

    `loss_mask`: 1 where a token is trained on [all]; `rollout_log_probs`: in nats [those of the engine's answers].
    Any further attribute may be set.
    """

    Status: ClassVar[type[SampleStatus]] = SampleStatus

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    multimodal_inputs: dict[str, Any] | None = None
    non_generation_time: float = 0.0

    @property
    def effective_response_length(self) -> int:
        """Tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or its part that `args.reward_key` names."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key else self.reward

    def update_from_meta_info(self, args: Any, meta_info: dict[str, Any]) -> None:
        """Take the status and the version of the weights from an answer of the engine."""
        if meta_info.get("weight_version") is not None:
            self.weight_versions.append(meta_info["weight_version"])
        of = SampleStatus
        self.status = {"length": of.TRUNCATED, "abort": of.ABORTED, "stop": of.COMPLETED}[
            meta_info["finish_reason"]["type"]
        ]

    def append_response_tokens(
        self,
        args: Any,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str = "",
    ) -> None:
        """Append a turn of the model, or with `trainable=False` of the environment, to all the lists."""
        mask = [1] * self.response_length if self.loss_mask is None else self.loss_mask
        before = self.rollout_log_probs or [0.0] * self.response_length
        self.loss_mask = [*mask, *[int(trainable)] * len(tokens)]
        self.rollout_log_probs = [*before, *(log_probs if trainable and log_probs else [0.0] * len(tokens))]
        self.tokens = [*self.tokens, *tokens]
        self.response_length += len(tokens)
        self.response += text
        if meta_info is not None:
            self.update_from_meta_info(args, meta_info)
