"""Finished trajectories for supervised training (`--loss-type sft`).

The column `segments` of a row is a list of `{"text": str, "weight": float}`. Each segment is encoded on its own, as
turns and observations of a rollout are, so that the model sees the same token ids in both. A token has the weight of
its segment. The first segment begins with what the tokenizer puts before texts (some put a BOS).
"""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedTokenizerBase

from sleuth.data.records import CHECKED_ROWS, read_records
from sleuth.data.render import check_encodable, opening_ids, with_opening
from sleuth.data.stream import RowStream
from sleuth.sample import TrainSample

Segments = list[dict[str, Any]]


class SftStream(RowStream[Segments]):
    """An endless stream of trajectories, each encoded only when it is asked for."""

    def __init__(self, rows: list[Segments], tokenizer: PreTrainedTokenizerBase, *, seed: int, shuffle: bool) -> None:
        super().__init__(rows, seed=seed, shuffle=shuffle)
        self._tokenizer = tokenizer

    def next_samples(self, count: int) -> list[TrainSample]:
        """The next `count` trajectories; every token after the first is trained on, with its weight."""
        return [encode_segments(segments, self._tokenizer) for segments in self.next_rows(count)]


def load_sft_rows(path: str, tokenizer: PreTrainedTokenizerBase, *, seed: int = 0, shuffle: bool = False) -> SftStream:
    """A stream over the trajectories of `path[@[a:b]]` (parquet, JSONL, JSONL.gz).

    Raises ValueError if the column `segments` is missing or a row of it is not such a list.
    """
    return SftStream(_read(path), tokenizer, seed=seed, shuffle=shuffle)


def check_sft_rows(path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise what `load_sft_rows` and the first batch would raise for the first rows."""
    for segments in _read(path, CHECKED_ROWS):
        encode_segments(segments, tokenizer)


def _read(path: str, limit: int | None = None) -> list[Segments]:
    records = read_records(path, ["segments"], limit)
    records.require("segments", "--loss-type sft")
    return [
        _checked_segments(row.get("segments"), f"row {index} of {records.path}")
        for index, row in enumerate(records.rows, start=records.first)
    ]


def encode_segments(segments: Segments, tokenizer: PreTrainedTokenizerBase) -> TrainSample:
    """One trajectory as token ids [T] and the weights [T - 1] of the tokens after the first."""
    encoded = tokenizer([segment["text"] for segment in segments], add_special_tokens=False)["input_ids"]
    ids = [token for part in encoded for token in part]
    weights = [float(s["weight"]) for s, part in zip(segments, encoded, strict=True) for _ in part]
    begun = with_opening(ids, opening_ids(tokenizer))
    weights = [0.0] * (len(begun) - len(ids)) + weights
    if len(begun) < 2:
        raise ValueError(f"expected a trajectory of at least 2 tokens, found {len(begun)}: {segments!r:.200}")
    return TrainSample(token_ids=begun, prompt_length=1, loss_mask=weights[1:])


def _checked_segments(value: Any, where: str) -> Segments:
    if not isinstance(value, list) or not value or not all(map(_is_segment, value)):
        raise ValueError(
            f"expected a list of {{'text': str, 'weight': number >= 0}} as 'segments' in {where}, found {value!r:.200}"
        )
    for segment in value:
        check_encodable(segment["text"], f"{where}, column 'segments'")
    return value


def _is_segment(segment: Any) -> bool:
    if not isinstance(segment, dict) or not isinstance(segment.get("text"), str):
        return False
    weight = segment.get("weight")
    return isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight) and weight >= 0
