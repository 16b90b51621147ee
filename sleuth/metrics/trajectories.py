"""Some trajectories of a step on disk, for a person to read: JSONL for programs, markdown for eyes.

Every segment is written with its source and whether it was trained on, so that one sees what the
model said, what the environment put in, and why the reward is what it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from sleuth.metrics.jsonl import finite
from sleuth.sample import Sample, Segment


def write_trajectories(
    path: str | Path, samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, limit: int
) -> None:
    """Write up to `limit` samples, spread evenly over the step, to `path` (JSONL) and beside it as markdown.

    The folder is made; existing files of that name are replaced. A limit of 0 writes nothing.
    """
    path = Path(path)
    chosen = spread(samples, limit)
    if not chosen:
        return
    records = [trajectory_record(sample, tokenizer) for sample in chosen]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records]
    _replace(path, "".join(lines))
    title = f"# {path.stem}: {len(records)} of {len(samples)} trajectories\n\n"
    _replace(path.with_suffix(".md"), title + "\n".join(map(trajectory_markdown, records)))


def spread(samples: Sequence[Sample], limit: int) -> list[Sample]:
    """Up to `limit` samples at even distances, so that many groups are seen; always the same ones."""
    if limit >= len(samples):
        return list(samples)
    return [samples[position * len(samples) // limit] for position in range(limit)]


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def trajectory_record(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A JSON-able view of a sample: text by segments, token ids, and how it was scored."""
    return {
        "index": sample.index,
        "group_index": sample.group_index,
        "data_source": sample.metadata.get("data_source"),
        "status": str(sample.status),
        "stop_reason": str(sample.stop_reason) if sample.stop_reason else None,
        "error": sample.error,
        "reward": None if sample.reward is None else finite(sample.reward),
        "reward_components": {name: finite(value) for name, value in sample.reward_components.items()},
        "rollout_metrics": {name: finite(value) for name, value in sample.rollout_metrics.items()},
        "weight_version": sample.weight_version,
        "label": _plain(sample.label),
        # Without that component the metadata's "answer" would be one of the data set.
        "answer": _plain(sample.metadata.get("answer")) if "answered" in sample.reward_components else None,
        "invalid_reason": _plain(sample.metadata.get("invalid_reason")),
        "prompt": _decode(sample.trace.prompt_ids, tokenizer),
        "segments": [_segment_record(sample, segment, tokenizer) for segment in sample.trace.segments],
        "prompt_ids": list(sample.trace.prompt_ids),
        "response_ids": list(sample.trace.response_ids),
        "loss_mask": list(sample.trace.loss_mask),
        "log_probs": [round(value, 4) for value in sample.trace.log_probs],
    }


def _segment_record(sample: Sample, segment: Segment, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    span = slice(segment.start, segment.end)
    trained = sum(sample.trace.loss_mask[span])
    mean_log_prob = sum(sample.trace.log_probs[span]) / trained if trained else None
    return {
        "source": segment.source,
        "tokens": segment.end - segment.start,
        "trained_tokens": trained,
        "mean_log_prob": None if mean_log_prob is None else round(mean_log_prob, 4),
        "text": _decode(sample.trace.response_ids[span], tokenizer),
    }


def _decode(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text as the model sees it: special tokens and spaces stay."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _plain(value: Any) -> Any:
    """Labels as JSON: numpy arrays of a parquet row become lists, what else JSON lacks its text."""
    if isinstance(value, dict):
        return {str(key): _plain(member) for key, member in value.items()}
    if isinstance(value, str | int | float | None):
        return value if not isinstance(value, float) else finite(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    return str(value)


def read_trajectories(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file that `write_trajectories` wrote."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line]


def trajectory_markdown(record: dict[str, Any]) -> str:
    """A record as a section of markdown: a heading with the score, then the segments in order."""
    parts = [f"## {headline(record)}\n", *(f"{name}: {value}\n" for name, value in findings(record))]
    parts.append(_block("prompt", record["prompt"]))
    parts.extend(_block(segment_heading(segment), segment["text"]) for segment in record["segments"])
    parts.append(f"Reward {_number(record['reward'])}: {reward_explanation(record)}\n")
    return "\n".join(parts)


def _block(heading: str, text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"**{heading}**\n\n{fence}text\n{text}\n{fence}\n"


def headline(record: dict[str, Any]) -> str:
    """`Sample 3 of prompt 1: reward 0.2, truncated (turn_limit)` and the like."""
    reason = record["stop_reason"] or "no stop reason"
    return (
        f"Sample {record['index']} of prompt {record['group_index']}: "
        f"reward {_number(record['reward'])}, {record['status']} ({reason})"
    )


def segment_heading(segment: dict[str, Any]) -> str:
    """`model, 12 tokens, trained on, mean log-prob -0.31` and the like."""
    trained, tokens = segment["trained_tokens"], segment["tokens"]
    use = {0: "not trained on", tokens: "trained on"}.get(trained, f"{trained} of them trained on")
    certainty = "" if segment["mean_log_prob"] is None else f", mean log-prob {segment['mean_log_prob']:.2f}"
    return f"{segment['source']}, {tokens} tokens, {use}{certainty}"


def reward_explanation(record: dict[str, Any]) -> str:
    """The reward's components and what the hook counted: why the reward is what it is."""
    numbers = record["reward_components"] | record["rollout_metrics"]
    return ", ".join(f"{name} {_number(value)}" for name, value in numbers.items()) or "no components were given"


def findings(record: dict[str, Any]) -> list[tuple[str, str]]:
    """What was expected, what was answered, and what was wrong with the format or the run, as far as it is known."""
    found = [("Expected", expected(record))]
    if "answered" in record["reward_components"] and "answer" in record:
        found.append(("Answered", "nothing" if record["answer"] is None else str(record["answer"])))
    if record.get("invalid_reason"):
        found.append(("Invalid format", str(record["invalid_reason"])))
    if record["error"]:
        found.append(("Error", record["error"]))
    return found


def expected(record: dict[str, Any]) -> str:
    """The accepted answers, when the label has Search-R1's shape, else the label as it is."""
    label = record["label"]
    if isinstance(label, dict):
        truth = label.get("ground_truth", label)
        target = truth.get("target", truth) if isinstance(truth, dict) else truth
        return " | ".join(map(str, target)) if isinstance(target, list) else str(target)
    return str(label)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}".rstrip("0").rstrip(".")
