"""What the loop waits for in a step and in a save of the demo's model.

    python -m benchmarks.trainer_waits [--trials 7] [--samples 64] [--threads 1] [--size 26M]

A step is trained with the pass that scores the policy first (--score-old-log-probs) and without it; samples have the
lengths of the demo's trajectories (trajectories.json) and random tokens. A checkpoint is saved with --async-save and
without; of the former the time until training may go on, and until it is published. Medians, in turn, one process.
The processor time, that of the writing thread included, is what to compare where other work keeps the machine busy.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.options import whole_number
from benchmarks.train_step import SIZES, make_samples, save_model

MODEL = Path(__file__).resolve().parents[1] / "data/demo/model"


def make_trainer(model: Path, samples: int, save: Path) -> Any:
    from sleuth.arguments import parse_args
    from sleuth.megatron.trainer import Trainer

    words = f"""
        --hf-checkpoint {model} --ref-load {model} --prompt-data unused --custom-rm-path a.b --colocate
        --rollout-batch-size {samples // 8} --n-samples-per-prompt 8 --use-kl-loss --use-dynamic-batch-size
        --max-tokens-per-gpu 4096 --save {save} --save-keep 1 --cpu-threads-per-actor 1
    """.split()
    return Trainer(parse_args(words))


def seconds(function: Callable[[], object]) -> tuple[float, float]:
    """On the clock and of processors."""
    start, cpu_start = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - start, time.process_time() - cpu_start


def measure(trainer: Any, options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Median seconds, on the clock and of processors, of each thing that is measured."""
    from sleuth.rollout.train_batches import shard_batch

    (steps,) = shard_batch(trainer.args, make_samples(options.samples))
    given = trainer.args
    found: dict[str, list[tuple[float, float]]] = {}

    def note(name: str, function: Callable[[], object], **flags: Any) -> None:
        trainer.args = given.model_copy(update=flags)
        found.setdefault(name, []).append(seconds(function))

    trainer.train(steps)  # the first one is slower
    trainer.save(1, {})
    trainer.finish_save()
    for trial in range(options.trials):
        note("step, policy scored first", lambda: trainer.train(steps), score_old_log_probs=True)
        note("step", lambda: trainer.train(steps))
        note("save", lambda trial=trial: trainer.save(2 * trial, {}), async_save=False)
        note("save in the background: training waits", lambda trial=trial: trainer.save(2 * trial + 1, {}))
        note("save in the background: published after further", trainer.finish_save)
    return {name: (median(wall), median(cpu)) for name, (wall, cpu) in _columns(found).items()}


def _columns(found: dict[str, list[tuple[float, float]]]) -> dict[str, list[tuple[float, ...]]]:
    return {name: list(zip(*times, strict=True)) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=whole_number(), default=7, help="how often each thing is measured [7]")
    parser.add_argument("--samples", type=whole_number(multiple=8), default=64, help="samples of a step [64]")
    parser.add_argument("--threads", type=whole_number(), default=1, help="threads of torch [1]")
    parser.add_argument("--size", choices=SIZES, help="a random model of train_step's instead of the demo's")
    options = parser.parse_args()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model") if options.size else MODEL
        if options.size:
            save_model(model, options.size)
        trainer = make_trainer(model, options.samples, Path(folder, "save"))
        torch.set_num_threads(options.threads)
        found = measure(trainer, options)
    for name, (wall, cpu) in found.items():
        print(f"{name:50}{wall:8.3f} s{cpu:8.3f} s of processors")
    ratio = found["step"][1] / found["step, policy scored first"][1]
    waits = found["save in the background: training waits"][0] / found["save"][0]
    print(
        json.dumps(
            {
                "name": "trainer_waits: processor seconds of a step, without / with the pass",
                "ratio": ratio,
                "save_ratio": waits,
            }
        )
    )


if __name__ == "__main__":
    main()
