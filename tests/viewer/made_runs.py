"""Runs to look at, written as a training run writes them: trajectories of real tokens, metrics, a configuration."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import yaml
from transformers import PreTrainedTokenizerFast

from sleuth.metrics.jsonl import MetricsFile
from sleuth.metrics.trajectories import write_trajectories
from sleuth.sample import Sample, SampleStatus, StopReason, TokenTrace
from tests.tiny_models import make_byte_bpe_tokenizer

SCRIPT = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
EMOJI = "the fox 🦊 and 👩‍👩‍👧"
ARABIC = "مرحبا بالعالم"


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    return make_byte_bpe_tokenizer()


def encoded(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def made_sample(index: int, said: str, *, right: bool, valid: bool = True, searches: int = 1) -> Sample:
    """A trajectory that searches (or not), reads a passage, and answers `said`; two samples a prompt."""
    row = index // 2
    question = f"<|im_start|>user\nwho wrote book {row}?<|im_end|>\n<|im_start|>assistant\n"
    trace = TokenTrace(encoded(question))
    if searches:
        ids = encoded(f"<search> book {row} </search>")
        trace.append_model(ids, [-0.5] * len(ids))
        trace.append_observation(encoded(f"<information>passage of {row}</information>"))
    ids = encoded(f"<answer> {said} </answer>")
    trace.append_model(ids, [-0.25] * len(ids))
    sample = Sample(
        index=index,
        group_index=row,
        prompt=question,
        trace=trace,
        label={"target": ["Ann"]},
        reward=float(right),
        reward_components={"exact_match": float(right), "valid_format": float(valid)},
        file="test.parquet",
        row=row,
    )
    sample.report(searches=searches, answer=said, invalid_reason=None if valid else "no answer tag")
    return sample.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)


def write_samples(run: Path, name: str, samples: list[Sample]) -> None:
    write_trajectories(run / "trajectories" / name, samples, tokenizer(), len(samples))


def write_run(run: Path, *, steps: int = 3, seed: int = 1) -> Path:
    """A run with `steps` steps of metrics and no trajectories yet; its tokenizer lies beside it."""
    run.mkdir(parents=True)
    model = run.parent / "model"
    tokenizer().save_pretrained(model)
    settings = {"hf_checkpoint": str(model), "seed": seed, "num_rollout": 10, "lr": 1e-6}
    (run / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    file = MetricsFile(run / "metrics.jsonl")
    for step in range(1, steps + 1):
        file.write(step, {"reward/mean": step / 10 + seed / 100, "reward/exact_match": step / 20})
    file.close()
    return run


def write_trainer_log_probs(run: Path, stem: str, values: list[list[float] | None]) -> None:
    path = run / "trajectories" / f"{stem}.trainer.json"
    path.write_text(json.dumps({"log_probs": values}), encoding="utf-8")
