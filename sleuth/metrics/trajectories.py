"""Writes some trajectories of each step to disk: as JSONL for programs, and as markdown for people.

Each segment has its source and whether it was trained on, so that a reader sees what the
model said, what the environment put in, and why the reward is what it is.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sleuth.labels import as_text
from sleuth.metrics.jsonl import finite
from sleuth.sample import LONGEST_ERROR, Sample, Segment, shortened
from sleuth.secrets import without_known
from sleuth.tokens import decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
SECONDS = "_seconds"
"""A metric whose name ends so is a time."""
LONGEST_NOTE = 10_000
"""Characters of a label or a note that are kept: an answer may be a whole page, in each of thousands of samples."""
NEEDED = (
    *("index", "group_index", "status", "stop_reason", "error", "label", "prompt", "segments"),
    *("reward", "reward_components", "rollout_metrics"),
)
"""The fields that every version of a record has."""


def write_trajectories(
    path: str | Path,
    samples: Sequence[Sample],
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    *,
    evaluation: bool = False,
) -> None:
    """Write up to `limit` samples, spread evenly over the step, to `path` (JSONL) and, beside it, as markdown.

    The folder is made if needed; existing files of that name are replaced. A limit of 0 writes nothing. `evaluation`:
    nothing was trained on. If a file cannot be written, the log says so and the run continues.
    """
    chosen = spread(samples, limit)
    if not chosen:
        return
    try:
        records = [trajectory_record(sample, tokenizer, evaluation=evaluation) for sample in chosen]
        _write(Path(path), records, f"{len(records)} of {len(samples)} trajectories")
    except Exception:  # hooks put anything into labels and notes, disks fill up
        logger.warning("trajectories could not be written to %s; the run goes on", path, exc_info=True)


def step_trajectories(run_dir: Path, step: int) -> Path:
    """Where a run keeps the trajectories of a step's training."""
    return run_dir / "trajectories" / f"step_{step:07d}.jsonl"


def write_trainer_log_probs(path: Path, log_probs: Sequence[Sequence[float | None]]) -> None:
    """Write the trainer's log-probabilities (nats) of the trajectories in `path`, in their order, beside them.

    They are those of the response's tokens before the step's updates, None where a token is not trained on. If the
    file cannot be written, the log says so and the run continues.
    """
    rounded = [[value if value is None else finite(round(value, 4)) for value in row] for row in log_probs]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(trainer_file(path), json.dumps({"log_probs": rounded}, allow_nan=False))
    except OSError:
        logger.warning("log-probabilities could not be written beside %s; the run goes on", path, exc_info=True)


def trainer_file(path: Path) -> Path:
    """Where the trainer's log-probabilities of the trajectories in `path` are."""
    return path.with_suffix(".trainer.json")


def _write(path: Path, records: list[dict[str, Any]], title: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    trainer_file(path).unlink(missing_ok=True)  # of other trajectories, where a step is done anew
    lines = [json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records]
    _replace(path, "".join(lines))
    _replace(path.with_suffix(".md"), f"# {path.stem}: {title}\n\n" + "\n".join(map(trajectory_markdown, records)))


def spread(samples: Sequence[Item], limit: int) -> list[Item]:
    """Up to `limit` samples at even distances, so that they come from many groups; always the same ones."""
    if limit >= len(samples):
        return list(samples)
    return [samples[position * len(samples) // limit] for position in range(limit)]


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(
        without_known(text), encoding="utf-8", errors="replace"
    )  # half of a surrogate pair becomes a question mark
    temporary.replace(path)


def trajectory_record(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, *, evaluation: bool = False
) -> dict[str, Any]:
    """A sample as a dictionary that JSON can hold: its text by segments, its token ids, and how it was scored."""
    return {
        "index": sample.index,
        "group_index": sample.group_index,
        "file": sample.file,
        "row": sample.row,
        "evaluation": evaluation,
        "data_source": _converted(sample.metadata.get("data_source")) if isinstance(sample.metadata, dict) else None,
        "status": str(sample.status),
        "stop_reason": str(sample.stop_reason) if sample.stop_reason else None,
        "error": None if sample.error is None else shortened(sample.error, LONGEST_ERROR),
        "reward": None if sample.reward is None else finite(sample.reward),
        "reward_components": {name: finite(value) for name, value in sample.reward_components.items()},
        "rollout_metrics": {name: finite(value) for name, value in sample.rollout_metrics.items()},
        "weight_version": sample.weight_version,
        "label": _plain(sample.label),
        "notes": {str(name): _plain(value) for name, value in sample.notes.items()},
        "prompt": decode(sample.trace.prompt_ids, tokenizer),
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
        "text": decode(sample.trace.response_ids[span], tokenizer),
    }


def _plain(value: Any) -> Any:
    """A value as JSON can hold it: numpy arrays become lists, and other types that JSON lacks become their text.

    What is longer than LONGEST_NOTE becomes the beginning of its text. What nests too deeply, or in itself, and what
    has no text becomes the name of its type: a log stops no run.
    """
    try:
        converted = _converted(value)
        text = converted if isinstance(converted, str) else json.dumps(converted, ensure_ascii=False)
        return converted if len(text) <= LONGEST_NOTE else shortened(text, LONGEST_NOTE)
    except Exception:
        return f"({type(value).__name__})"


def _converted(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _converted(member) for key, member in value.items()}
    if isinstance(value, str | int | float | None):
        return value if not isinstance(value, float) else finite(value)
    if hasattr(value, "tolist"):
        return _converted(value.tolist())
    if isinstance(value, list | tuple):
        return [_converted(member) for member in value]
    return str(value)


def read_trajectories(path: str | Path) -> list[dict[str, Any]]:
    """The records in a file of `write_trajectories`, also in files of older versions. ValueError for other files."""
    records = []
    with Path(path).open(encoding="utf-8", errors="replace", newline="\n") as file:  # texts may hold other line ends
        for number, line in enumerate(file, start=1):
            if line.strip():
                records.append(read_record(line, f"line {number} of {path}", Path(path).name))
    return records


def read_record(line: str, where: str, file_name: str) -> dict[str, Any]:
    """The record in a line of the file `file_name`; ValueError, which says `where`, for any other line."""
    return _without_gaps(_parsed(line, where), file_name)


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"expected a trajectory in {where}, found no JSON ({error}); was the file cut short?"
        ) from None
    missing = [name for name in NEEDED if name not in record] if isinstance(record, dict) else NEEDED
    if missing:
        raise ValueError(
            f"expected a trajectory in {where}, found one without {', '.join(missing)}; name a file of "
            "trajectories/ in a run's folder"
        )
    if (wrong := misshapen(record)) is not None:
        raise ValueError(
            f"expected a trajectory in {where}, found {wrong} of another shape: {str(record[wrong])[:60]!r}; remove "
            "the line"
        )
    return dict(record)


def misshapen(record: Mapping[str, Any]) -> str | None:
    """The first field of a record that has not the type of a trajectory's, if any: what is absent is not looked at."""
    checks: dict[str, bool] = {
        "segments": isinstance(found := record.get("segments", []), list) and all(map(_is_segment, found)),
        "prompt": isinstance(record.get("prompt", ""), str),
        "reward": isinstance(record.get("reward"), int | float | None),
    }
    for name in ("reward_components", "rollout_metrics", "notes"):
        checks[name] = isinstance(record.get(name, {}), dict)
    for name in ("reward_components", "rollout_metrics"):
        checks[name] = checks[name] and all(isinstance(v, int | float | None) for v in record.get(name, {}).values())
    for name in ("index", "group_index", "row"):
        checks[name] = isinstance(record.get(name), int | None)
    return next((name for name, fits in checks.items() if not fits), None)


def _is_segment(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("tokens"), int) and isinstance(found.get("text"), str)


def _without_gaps(record: dict[str, Any], file_name: str) -> dict[str, Any]:
    """The record with the fields that older files lack."""
    notes = {name: record[name] for name in ("answer", "invalid_reason") if name in record}
    if "answered" not in record["reward_components"]:
        notes.pop("answer", None)
    older = {"file": None, "row": None, "evaluation": file_name.startswith("eval_"), "notes": notes}
    return older | record


def trajectory_markdown(record: dict[str, Any]) -> str:
    """A record as a section of markdown: a heading with the score, the segments in order, then all numbers."""
    parts = [f"## {headline(record)}\n", *(f"{name}: {value}\n" for name, value in findings(record))]
    parts.append(_block("prompt", record["prompt"]))
    for segment in record["segments"]:
        parts.append(_block(segment_heading(segment, evaluation=record["evaluation"]), segment["text"]))
    parts.extend(f"{name}: {value}\n" for name, value in numbers(record))
    return "\n".join(parts)


def _block(heading: str, text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"**{heading}**\n\n{fence}text\n{text}\n{fence}\n"


def headline(record: dict[str, Any]) -> str:
    """A heading such as `Sample 3 of prompt 1 (row 17 of train.parquet): reward 0.2, truncated (turn_limit)`."""
    reason = record["stop_reason"] or "no stop reason"
    place = "" if record["row"] is None else f" (row {record['row']} of {Path(record['file'] or 'the data').name})"
    return (
        f"Sample {record['index']} of prompt {record['group_index']}{place}: "
        f"reward {_number(record['reward'])}, {record['status']} ({reason})"
    )


def segment_heading(segment: dict[str, Any], *, evaluation: bool = False) -> str:
    """A heading such as `model, 12 tokens, trained on, mean log-prob -0.31`; an evaluation trains on nothing."""
    trained, tokens = segment["trained_tokens"], segment["tokens"]
    verb = "generated by the model" if evaluation else "trained on"
    use = {0: f"not {verb}", tokens: verb}.get(trained, f"{trained} of them {verb}")
    certainty = "" if segment["mean_log_prob"] is None else f", mean log-prob {segment['mean_log_prob']:.2f}"
    return f"{segment['source']}, {tokens} tokens, {use}{certainty}"


def numbers(record: dict[str, Any]) -> list[tuple[str, str]]:
    """All numbers with their names: the reward and its components, then the hooks' counts, then seconds."""
    times = {name: value for name, value in record["rollout_metrics"].items() if name.endswith(SECONDS)}
    counts = {name: value for name, value in record["rollout_metrics"].items() if name not in times}
    found = [("Reward", f"{_number(record['reward'])} ({_list(record['reward_components']) or 'no components'})")]
    if counts:
        found.append(("Counts", _list(counts)))
    if times:
        found.append(("Times in seconds", _list({name.removesuffix(SECONDS): t for name, t in times.items()})))
    return found


def _list(values: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in values.items())


def findings(record: dict[str, Any]) -> list[tuple[str, str]]:
    """The expected answer, the given one, what was wrong with the format or the run, and the hooks' other notes."""
    notes = dict(record["notes"])
    found = [("Expected", as_text(record["label"]))]
    if "answer" in notes:
        answer = notes.pop("answer")
        found.append(("Answered", "nothing" if answer is None else str(answer)))
    if invalid := notes.pop("invalid_reason", None):
        found.append(("Invalid format", str(invalid)))
    if record["error"]:
        found.append(("Error", record["error"]))
    return found + [(name, str(value)) for name, value in notes.items()]


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}".rstrip("0").rstrip(".")
