"""Checks, before anything expensive starts, that the files and folders which the settings name exist."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sleuth.arguments.args import Args
from sleuth.arguments.parser import ArgumentsError
from sleuth.checkpoints import JOURNAL, TRACKER, find_checkpoint, holds_checkpoint, read_description, resuming_problem
from sleuth.data_path import DataPath
from sleuth.engine.launch import missing_engine, missing_router
from sleuth.manifest import check_sizes
from sleuth.paths import check_writable


def check_files(args: Args) -> None:
    """Raise ValueError listing every file or folder that is missing or cannot be written."""
    problems = [
        *_model_problems(Path(args.hf_checkpoint)),
        *_checkpoint_problems(args),
        *data_problems(args),
        *_journal_problems(args),
        *_output_problems(args),
        *_package_problems(args),
    ]
    if problems:
        raise ArgumentsError("files are missing\n  " + "\n  ".join(problems))


def _journal_problems(args: Args) -> Iterator[str]:
    folder = args.debug_train_only
    if folder is not None and not any((folder / JOURNAL).glob("step_*")):
        yield (
            f"--debug-train-only: expected the --save of a run, with a folder {JOURNAL} in it, found none in {folder}; "
            "its first run writes one, unless --no-rollout-journal is given"
        )


def read_hf_config(args: Args) -> dict[str, Any]:
    """The config.json of `--hf-checkpoint`."""
    return read_config(Path(args.hf_checkpoint))


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder; ValueError says what to do if it is missing."""
    for problem in _model_problems(folder):
        raise ArgumentsError(problem)
    return parse_config(folder)


def parse_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, which needs no tokenizer; ValueError says what to do if it cannot be used."""
    path = folder / "config.json"
    try:
        text = path.read_text(encoding="utf-8-sig")
        config = json.loads(text)
    except OSError as error:
        raise ArgumentsError(f"expected a model's {path}, found none that can be read: {error.strerror}") from error
    except ValueError as error:
        found = f"not JSON: {error}" if path.stat().st_size else "an empty file"
        raise ArgumentsError(f"{path}: expected a JSON object, found {found}; download it again") from error
    if not isinstance(config, dict):
        raise ArgumentsError(f"{path}: expected a JSON object, found {text.strip()[:40]!r}; download it again")
    return config


def is_hf_folder(folder: Path) -> bool:
    """Whether `folder` holds a Hugging Face model rather than torch_dist checkpoints."""
    return (folder / "config.json").is_file() and not holds_checkpoint(folder)


def _model_problems(folder: Path) -> Iterator[str]:
    if not (folder / "config.json").is_file():
        name = f"Qwen/{folder.name}" if folder.name.startswith("Qwen") else "OWNER/MODEL"
        yield (
            f"--hf-checkpoint: expected a model's folder with config.json, found none at {folder}; download it, for "
            f"example `hf download {name} --local-dir {folder}`"
        )
    elif not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        yield f"--hf-checkpoint: expected a tokenizer beside config.json, found none in {folder}; copy it there"


def _checkpoint_problems(args: Args) -> Iterator[str]:
    if args.ref_load is not None and not (holds_checkpoint(args.ref_load) or is_hf_folder(args.ref_load)):
        yield (
            f"--ref-load: expected a Hugging Face folder (config.json) or a torch_dist checkpoint ({TRACKER}), found "
            f"none at {args.ref_load}; pass {args.hf_checkpoint} itself, or make a checkpoint with "
            f"`python tools/convert_hf_to_torch_dist.py --hf-checkpoint {args.hf_checkpoint} --save {args.ref_load}`"
        )
    resumes_own = args.load is not None and args.load == args.save and not args.finetune
    if args.load is not None and not resumes_own and not holds_checkpoint(args.load):
        yield f"--load: expected a checkpoint ({TRACKER}), found none at {args.load}; correct the path or drop --load"
    for what, folder in (("--ref-load", args.ref_load), ("--load", args.load)):
        if folder is not None:
            yield from _tracker_problems(what, folder)
    yield from _resuming_problems(args)
    new_run = args.load is None or args.finetune
    if args.save is not None and new_run and (args.save / TRACKER).is_file():
        yield (
            f"--save: expected a folder without checkpoints for a new run, found some in {args.save}, which it would "
            f"replace; --load {args.save} {'without --finetune ' if args.finetune else ''}goes on from them, or save "
            "elsewhere"
        )


def _tracker_problems(what: str, folder: Path) -> Iterator[str]:
    """A checkpoint, or a file of one, that is missing or was cut, for example by an interrupted copy."""
    try:
        if found := find_checkpoint(folder):
            check_sizes(found)
    except ValueError as error:
        yield f"{what}: {error}"


def _resuming_problems(args: Args) -> Iterator[str]:
    """A checkpoint that is there, but that training cannot go on from."""
    if args.load is None or args.finetune or args.eval_only:
        return
    try:
        found = find_checkpoint(args.load)
    except ValueError:
        return  # told already
    try:
        if found is None or not read_description(found):
            return  # of something else's making: the trainer will see
        problem = resuming_problem(found, distributed=args.use_distributed_optimizer)
    except ValueError as error:
        problem = f"--load: {error}"
    if problem:
        yield problem


def data_problems(args: Args) -> Iterator[str]:
    """A sentence for each file of prompts that is not there."""
    named = {} if args.eval_only else {"--prompt-data": args.prompt_data}
    named |= {f"--eval-prompt-data {name}": path for name, path in args.eval_sets.items()}
    for what, path in named.items():
        data = DataPath.parse(path)
        if not Path(data.path).is_file() and data.hub_file is None:
            yield (
                f"{what}: expected a parquet or JSONL file, found none at {data.path}; correct the path, or make one "
                "with `python tools/prepare_data.py`; owner/set is a data set of the Hugging Face hub"
            )


def _package_problems(args: Args) -> Iterator[str]:
    if fault := missing_engine():
        yield fault
    if args.router and (fault := missing_router()):
        yield fault
    for package in ("tensorboard", "wandb", "swanlab", "trackio"):
        if getattr(args, f"use_{package}") and importlib.util.find_spec(package) is None:
            yield (
                f"--use-{package}: expected the package {package}, found none; `pip install {package}`, or drop the "
                "flag"
            )


def _output_problems(args: Args) -> Iterator[str]:
    for what, folder in (("--save", args.save), ("--run-dir", args.run_dir)):
        try:
            if folder is not None:
                check_writable(folder, what)
        except ValueError as error:
            yield str(error)
