"""Samples and a tokenizer for the tests of metrics; no engine, no download."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sleuth.sample import Sample, SampleStatus, StopReason, TokenTrace

WORDS = [
    "<unk>",
    "who",
    "wrote",
    "it",
    "<search>",
    "book",
    "</search>",
    "passage",
    "<answer>",
    "Ann",
    "</answer>",
    "```",
]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, so that ids are readable in a test."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def make_sample(
    index: int = 0,
    group: int = 0,
    *,
    reward: float | None = 1.0,
    components: dict[str, float] | None = None,
    reported: dict[str, float] | None = None,
    status: SampleStatus = SampleStatus.COMPLETED,
    reason: StopReason = StopReason.ANSWERED,
    source: str | None = None,
    version: str | None = None,
    label: Any = None,
) -> Sample:
    """3 prompt tokens, 3 model tokens, 2 observed ones, 3 model tokens."""
    trace = TokenTrace([1, 2, 3])
    trace.append_model([4, 5, 6], [-0.1, -0.2, -0.3])
    trace.append_observation([7, 7])
    trace.append_model([8, 9, 10], [-0.5, -0.5, -0.5])
    return Sample(
        index=index,
        group_index=group,
        prompt="who wrote it",
        trace=trace,
        label=label,
        metadata={} if source is None else {"data_source": source},
        reward=reward,
        reward_components=components or {},
        rollout_metrics=reported or {},
        weight_version=version,
    ).finish(status, reason)
