"""Checks all that can be checked before Ray starts: hooks, files, model, data, disk, Ray, the search backend."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from sleuth.arguments import Args, ArgumentsError, check_files, check_model, read_hf_config
from sleuth.arguments.checks import flag
from sleuth.arguments.model_check import fit_to_model
from sleuth.arguments.model_scripts import known_model, known_models
from sleuth.checkpoints import find_checkpoint
from sleuth.dtypes import dtype_name, slow_on_cpu
from sleuth.hooks import Settings, check_hooks, declared_settings, hook_modules, load_hook, resolve_sections
from sleuth.manifest import MANIFEST
from sleuth.memory_plan import checkpoints_kept
from sleuth.paths import nearest_existing
from sleuth.prompt_templates import lack_instruction

if TYPE_CHECKING:
    from sleuth.data import PromptRow

logger = logging.getLogger(__name__)

ArgsT = TypeVar("ArgsT", bound=Args)


def preflight(args: ArgsT, *, planning: bool = False, warn: Callable[[str], None] = logger.warning) -> ArgsT:
    """Check `args`; returns them as the run will have them, with the model's shape and all hooks' sections filled in.

    Raises ValueError (or OSError) for the first problem that would end the run, with expected, found and remedy.
    Problems that only may hurt the run are passed to `warn`. `planning` is for a run elsewhere or later: files, data
    or a search server that are missing on this machine are then passed to `warn`, too, and scripts/models/ may give
    the model's shape.
    """
    modules = hook_modules(args)
    args = with_hook_settings(args, modules)
    missing = _complaint(check_files, args)
    if missing and not planning:
        raise ArgumentsError(missing)
    checked: dict[str, list[PromptRow]] = {}
    args = with_model(args, planning=planning)
    if args.sglang_options:
        check_sglang_options(args, planning=planning, warn=warn)
    if not missing:
        try:
            checked = check_data(args)
        except FileNotFoundError as error:  # the hub did not give it, which a plan can do without
            if not planning:
                raise
            missing = str(error)
    if missing:
        warn(missing)
    else:
        told = (*bare_questions(args, checked), *unwinnable_rows(args, modules), *unverified(args), check_disk(args))
        for sentence in filter(None, told):
            warn(sentence)
    if not planning:
        if warning := check_precision(args):
            warn(warning)
        from sleuth.cluster.ray_environment import check_ray  # imports Ray, which a plan does not need

        check_ray(args)
    if args.search_check and not args.debug_train_only:
        trouble = ask_services(args, modules)
        if trouble and not planning:
            raise ValueError(trouble)
        if trouble:
            warn(trouble)
    return args


def check_precision(args: Args) -> str | None:
    """A warning where trainer or engines compute in a precision for which this machine, without a GPU, is slow."""
    import torch

    if torch.cuda.is_available():
        return None
    for given in ("sglang_dtype", "dtype"):
        if warning := slow_on_cpu(getattr(args, given) or "auto"):
            return f"{flag(given)}: {warning}"
    return None


def _complaint(check: Callable[[Args], None], args: Args) -> str | None:
    try:
        check(args)
    except ValueError as error:
        return str(error)
    return None


def with_hook_settings(args: ArgsT, modules: Sequence[ModuleType]) -> ArgsT:
    """`args` with every section that the hooks declare, defaults included; ValueError for settings that are wrong."""
    classes = declared_settings(modules)
    _check_flags_are_read(args, classes)
    sections = resolve_sections(args, classes)
    args = args.model_copy(update={"custom_config": args.custom_config | sections})
    check_hooks(args)
    return args


def default_sections(args: Args) -> dict[str, dict[str, Any]]:
    """The hooks' sections as they would be if nobody had set anything; {} where one cannot do without."""
    bare = args.model_copy(update={"custom_config": {}, "search_backend": None, "search_url": None})
    try:
        return resolve_sections(bare, declared_settings(hook_modules(args)))
    except ValueError:
        return {}


def _check_flags_are_read(args: Args, classes: Sequence[type[Settings]]) -> None:
    read = {name for cls in classes for name in cls.flags}
    for name in ("search_backend", "search_url"):
        if getattr(args, name) is not None and name not in read:
            raise ArgumentsError(
                f"{flag(name)} has no effect: none of the hooks that the flags name reads it; add "
                "--custom-generate-function-path generate_with_search.generate, or drop it"
            )


def with_model(args: ArgsT, *, planning: bool = False) -> ArgsT:
    """`args` with the model's shape; ValueError where flags contradict it, or where it cannot be known."""
    if not planning or (Path(args.hf_checkpoint) / "config.json").is_file():
        return check_model(args, read_hf_config(args))
    known = known_model(args.hf_checkpoint)
    if known is None:
        raise ArgumentsError(
            f"--hf-checkpoint: expected a folder with config.json, or named after one of {', '.join(known_models())} "
            f"to plan with; found {args.hf_checkpoint}"
        )
    return fit_to_model(args, known.shape, known.context, known.script)


def check_sglang_options(args: Args, *, planning: bool, warn: Callable[[str], None]) -> None:
    """ValueError for options that SGLang's server does not take; a plan may be made where there is no SGLang."""
    from sleuth.engine.option_check import NoSglangError, check_options  # imports torch

    try:
        check_options(args.sglang_options)
    except NoSglangError as error:
        if not planning:
            raise
        warn(str(error))


def ask_services(args: Args, modules: Sequence[ModuleType]) -> str | None:
    """Call the `async def check_services(args)` of each hook module that has one; returns the first complaint."""
    for module in modules:
        check = getattr(module, "check_services", None)
        if check is not None:
            try:
                asyncio.run(check(args))
            except ValueError as error:
                return str(error)
    return None


def check_data(args: Args) -> dict[str, list[PromptRow]]:
    """The first rows of each file of prompts; only these are read.

    Raises ValueError or OSError if tokenizer, prompts or labels do not fit.
    """
    from sleuth.arguments import check_tokenizer
    from sleuth.data import check_rows, check_sft_rows
    from sleuth.rollout.engine_client import embedding_size
    from sleuth.tokens import load_tokenizer

    tokenizer = load_tokenizer(args.hf_checkpoint)
    check_tokenizer(tokenizer, embedding_size(args.hf_checkpoint))
    if args.loss_type == "sft":
        check_sft_rows(args.prompt_data, tokenizer)
        return {}
    checked = {} if args.eval_only else {args.prompt_data: check_rows(args.prompt_data, args, tokenizer)}
    for path in args.eval_sets.values():
        checked[path] = check_rows(path, args, tokenizer, evaluation=True)
    return checked


def bare_questions(args: Args, rows: Mapping[str, Sequence[PromptRow]]) -> Iterator[str]:
    """A sentence for each file whose prompts do not say what the generate hook's protocol is.

    The module of such a hook names the `--prompt-template` that does, as PROMPT_TEMPLATE.
    """
    if args.custom_generate_function_path is None or args.prompt_template is not None:
        return
    generate = load_hook(args.custom_generate_function_path, "generate")
    template = getattr(sys.modules[generate.__module__], "PROMPT_TEMPLATE", None)
    if template is None:
        return
    for path, checked in rows.items():
        if lack_instruction([row.prompt for row in checked]):
            yield (
                f"the prompts of {path} are bare questions, such as {str(checked[0].prompt)[:80]!r}: nothing tells the "
                f"model how to search and answer; add --prompt-template {template}, or a file with the words that the "
                "model knows"
            )


def unwinnable_rows(args: Args, modules: Sequence[ModuleType]) -> list[str]:
    """Sentences about rows that no answer can win, from hook modules that have `check_label(label) -> bool`.

    Raises ValueError, with file and row, for a label that one of them cannot read.
    """
    from sleuth.data import check_labels

    checks = [module.check_label for module in modules if callable(getattr(module, "check_label", None))]
    paths = [] if args.eval_only else [(args.prompt_data, False)]
    paths += [(path, True) for path in args.eval_sets.values()]
    found = [check_labels(path, args, check, evaluation=held_out) for check in checks for path, held_out in paths]
    return [sentence for sentence in found if sentence]


def unverified(args: Args) -> Iterator[str]:
    """A sentence for each checkpoint that will be loaded without a look at its content, though --verify asks for it."""
    for name, folder in (("--load", args.load), ("--ref-load", args.ref_load)):
        found = find_checkpoint(folder) if folder is not None and args.verify else None
        if found is not None and not (found / MANIFEST).is_file():
            yield (
                f"{name}: {found} was saved without checksums ({MANIFEST}), so damage to its files may go unnoticed; "
                "the checkpoints that this run saves have them"
            )


def check_disk(args: Args) -> str | None:
    """Raise ValueError if `--save` has no room for one checkpoint; warn if it has none for all that will be kept."""
    if args.save is None:
        return None
    size = checkpoint_bytes(args)
    kept = checkpoints_kept(args)
    folder = nearest_existing(args.save)
    free = shutil.disk_usage(folder).free
    found = f"{folder} has {_gb(free)} free"
    if free < size:
        raise ValueError(
            f"--save: expected room for a checkpoint, about {_gb(size)}; {found}; make room, or save elsewhere"
        )
    if free < kept * size:
        return (
            f"{kept} checkpoints of about {_gb(size)} are to lie in --save at once, and {found}: make room, or save "
            "fewer (--save-keep, --save-interval)"
        )
    return None


def checkpoint_bytes(args: Args) -> int:
    """Estimated bytes of a training checkpoint: weights, float32 weights of the optimizer, and Adam's two moments."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):  # no memory, no weights
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.hf_checkpoint))
    bfloat16 = dtype_name(args.dtype, on_gpu=torch.cuda.is_available()) == "bfloat16"
    return model.num_parameters() * (2 + 4 + 8 if bfloat16 else 4 + 8)


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
