"""Train a language model: rollout, train, sync, evaluate, save.

python train.py --help
bash run_demo.sh                the whole loop on a laptop
bash run_qwen2.5_3B.sh          one node of 8 GPUs
"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from pathlib import Path

import yaml
from rich.console import Console

from sleuth.arguments import Args, changes, config_table, parse_args_or_exit
from sleuth.checkpoints import CONFIGURATION, find_checkpoint, saved_step
from sleuth.cluster.exported import weights_to_evaluate
from sleuth.cluster.logs import configure_logging, failure_message, reason
from sleuth.cluster.preflight import default_sections, preflight
from sleuth.cluster.restarts import Restart, Restarts
from sleuth.cluster.rollout_group import RolloutGroup
from sleuth.cluster.run import Run, start_rollout, start_run
from sleuth.cluster.run_folders import own_folders
from sleuth.cluster.signals import Interruption, end_on_signals
from sleuth.cluster.sync import sync_weights
from sleuth.leftovers import remove_leftovers
from sleuth.metrics.memory import process_memory
from sleuth.metrics.speed import training_speed
from sleuth.metrics.timing import timed
from sleuth.metrics.tracker import Tracker
from sleuth.paths import full_folder
from sleuth.secrets import redact

logger = logging.getLogger("train")


def train(args: Args, run: Run, tracker: Tracker) -> None:
    """The loop. Step numbers are 1-based; step 0 is the evaluation before training."""
    trainer, rollout, limit = run.trainer, run.rollout, args.max_logprob_diff
    sync = sync_weights(trainer, rollout, run.steps_done, max_difference=limit)
    if run.steps_done == 0 and args.eval_before_train and (before := sync | rollout.evaluate(0)):
        tracker.log(0, before)

    for step in range(run.steps_done + 1, args.num_rollout + 1):
        metrics: dict[str, float] = {}
        try:
            with timed(metrics, "step"):
                rollout_and_train(run, step, metrics)
                evaluate = is_due(step, args.eval_interval, args.num_rollout)
                if evaluate or is_due(step, args.update_weights_interval, args.num_rollout):
                    with timed(metrics, "sync"):
                        metrics |= sync_weights(trainer, rollout, step, max_difference=limit)
            if evaluate:
                with timed(metrics, "evaluation"):
                    metrics |= rollout.evaluate(step)
        finally:
            if run.steps_done == step:  # before it is saved: a resumed run does not come back to a saved step
                tracker.log(step, metrics)
        if args.save and is_due(step, args.save_interval, args.num_rollout):
            saving: dict[str, float] = {}
            with timed(saving, "save"):
                run.save()
            tracker.log(step, saving)
    run.finish_save()


def rollout_and_train(run: Run, step: int, metrics: dict[str, float]) -> None:
    """One step's data, and the training on them; the data are let go at the end."""
    with timed(metrics, "rollout"):
        data = run.generate(step)
    metrics |= data.metrics
    with timed(metrics, "train"):
        run.train(step, data, metrics)
    metrics |= training_speed(run.args, metrics) | process_memory("driver")


def rollout_only(args: Args, rollout: RolloutGroup, tracker: Tracker) -> None:
    """`--debug-rollout-only`: every step's data are made, scored and logged, and let go."""
    for step in range(1, args.num_rollout + 1):
        metrics: dict[str, float] = {}
        with timed(metrics, "rollout"):
            metrics |= rollout.generate(step).metrics
        tracker.log(step, metrics)


def evaluate_only(args: Args, run_dir: Path) -> None:
    """`--eval-only`: one evaluation, logged under the step of the checkpoint, with engines alone."""
    with (
        weights_to_evaluate(args, run_dir) as (evaluated, step),
        start_rollout(evaluated, run_dir) as rollout,
        Tracker(args, run_dir) as tracker,
    ):
        metrics: dict[str, float] = {}
        with timed(metrics, "evaluation"):
            metrics |= rollout.evaluate(step)
        tracker.log(step, metrics)


def is_due(step: int, interval: int | None, last: int) -> bool:
    """Whether something that happens every `interval` steps, and after the last, happens now."""
    return interval is not None and (step % interval == 0 or step == last)


def exit_if_done(args: Args) -> None:
    """End here, before anything starts, if the checkpoint to resume from has no step left to do."""
    if args.load is None or args.finetune or args.eval_only:
        return
    try:
        step = saved_step(args.load)
    except ValueError:
        return  # preflight tells what is wrong with it
    held = f"the checkpoint in {args.load} holds step {step}"
    if step == args.num_rollout:
        sys.stdout.write(f"{held}, --num-rollout {args.num_rollout} is done; raise --num-rollout to go on\n")
        sys.exit(0)
    if step is not None and step > args.num_rollout:
        sys.stderr.write(
            f"error: {held}, expected at most --num-rollout {args.num_rollout}; raise --num-rollout above {step} to go "
            "on, or --load an earlier checkpoint\n"
        )
        sys.exit(2)


def origin(args: Args, steps_done: int) -> str | None:
    """Which weights the run starts from, where they are not those of a new run."""
    if args.finetune:
        return f"starting from the weights of {args.load} (--finetune)"
    return f"resumed from step {steps_done} of {args.load}" if steps_done else None


def changed_since(args: Args) -> str | None:
    """What differs from the configuration of the checkpoint that is resumed, where that is known."""
    if args.load is None:
        return None
    try:
        found = find_checkpoint(args.load)
        text = (found / CONFIGURATION).read_text(encoding="utf-8") if found else ""
        before = yaml.safe_load(text)
    except (ValueError, OSError, yaml.YAMLError):
        return None  # an older checkpoint has none
    if not isinstance(before, dict):
        return None
    found_changes = changes(before, yaml.safe_load(args.to_yaml()))
    return f"changed since the checkpoint: {'; '.join(found_changes) or 'nothing'}"


def main() -> None:
    restarts, interruption = Restarts.so_far(), end_on_signals()
    args: Args = parse_args_or_exit()
    if args.eval_only:
        args = args.model_copy(update={"save": None, "ref_load": None})  # which an evaluation does without
    exit_if_done(args)
    warnings: list[str] = []
    with ExitStack() as folders:
        try:
            args = preflight(args, warn=warnings.append)
            folders.enter_context(own_folders(args))
        except (ValueError, OSError) as error:
            sys.exit(f"error: {redact(str(error))}")
        again = start(args, args.run_dir.resolve(), interruption, restarts, warnings)
    if again:
        again.begin()


def start(
    args: Args, run_dir: Path, interruption: Interruption, restarts: Restarts, warnings: list[str]
) -> Restart | None:
    """The run itself, in folders of its own.

    Where it fails, ends the process with a line that says why, or returns how it goes on (--restarts).
    """
    try:
        configure_logging(run_dir, "driver", args)
        args.write(run_dir / "config.yaml")
    except OSError as error:
        sys.exit(f"error: {full_folder(error, run_dir) or error}")
    remove_leftovers()
    console = Console()
    console.print(config_table(args, only_changed=True, default_sections=default_sections(args)))
    console.print(f"all else is as by default: {run_dir / 'config.yaml'}", soft_wrap=True, markup=False)
    for warning in warnings:
        console.print(f"warning: {redact(warning)}", style="yellow", soft_wrap=True, markup=False)
    console.print(f"starting (it takes a minute or so); logs: {run_dir / 'logs'}", soft_wrap=True, markup=False)
    try:
        if args.debug_rollout_only:
            with start_rollout(args, run_dir) as rollout, Tracker(args, run_dir) as tracker:
                rollout_only(args, rollout, tracker)
        elif args.eval_only:
            evaluate_only(args, run_dir)
        else:
            with start_run(args, run_dir, interruption) as run:
                restarts.progress = run.progress
                if line := origin(args, run.steps_done):
                    for told in filter(None, (line, changed_since(args))):
                        console.print(redact(told), soft_wrap=True, markup=False)
                        logger.info(told)
                with Tracker(args, run_dir, first_step=run.steps_done + 1) as tracker, run.saved_on_exit():
                    train(args, run, tracker)
    except KeyboardInterrupt as interrupted:
        sys.exit(str(interrupted) or "interrupted before the first step")
    except Exception as error:
        ended, again = failure_message(error, run_dir, args.save), restarts.after(error, args)
        if not isinstance(again, Restart):
            sys.exit("\n".join(filter(None, (ended, again))))
        logger.warning("%s; %s", reason(error, run_dir).removesuffix("; start again"), again.told)
        return again
    return None


if __name__ == "__main__":
    main()
