"""Flags that have an effect only with another one: given without it they are a mistake, which is told.

A value that says that something is off (0, no, nothing) is true without the switch as well, so it is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from pydantic.fields import FieldInfo

from sleuth.arguments.all_flags import AllFlags


class Dependent(NamedTuple):
    """Flags (field names, separated by blanks) that do something only while `works` holds.

    `why` goes on after the flag's name. `switch`: the field that turns them on. If it was turned
    off by name (--no-use-kl-loss after a script's flags), nothing is reported: the user knows.
    """

    names: str
    works: Callable[[AllFlags], bool]
    why: str
    switch: str | None = None


def _needs(names: str, switch: str) -> Dependent:
    """The usual kind: one switch, which is on when its value is not 0, no or nothing."""
    name = flag(switch)
    return Dependent(
        names,
        lambda args: bool(getattr(args, switch)),
        f"has no effect without {name}; add {name}, or drop {{flag}}",
        switch,
    )


def flag(name: str) -> str:
    """`hf_checkpoint` -> `--hf-checkpoint`."""
    return "--" + name.replace("_", "-")


_NORMALISED = ("grpo", "gspo", "cispo")

TABLE = (
    _needs("save_interval save_keep async_save restarts", "save"),
    _needs("finetune", "load"),
    _needs("apply_chat_template_kwargs tool_key", "apply_chat_template"),
    Dependent(
        "n_samples_per_eval_prompt eval_temperature eval_top_p eval_max_response_len eval_input_key eval_label_key "
        "eval_data_source_filter",
        lambda args: bool(args.eval_interval) or args.eval_only,
        "has no effect without --eval-interval; add --eval-interval or --eval-only, or drop {flag}",
        "eval_interval",
    ),
    Dependent(
        "eval_top_p",
        lambda args: any(args.eval_temperature),
        "has no effect with --eval-temperature 0 alone, which is greedy; add a temperature, or drop {flag}",
    ),
    _needs("wandb_project wandb_group", "use_wandb"),
    _needs("swanlab_project", "use_swanlab"),
    _needs("trackio_project", "use_trackio"),
    _needs("kl_loss_coef kl_loss_type", "use_kl_loss"),
    _needs("kl_penalty_type", "kl_coef"),
    _needs("overlong_penalty_factor", "overlong_buffer_len"),
    _needs("max_tokens_per_gpu", "use_dynamic_batch_size"),
    Dependent(
        "micro_batch_size",
        lambda args: not args.use_dynamic_batch_size or args.micro_batch_size == 1,
        "has no effect with --use-dynamic-batch-size; drop one of them",
    ),
    Dependent(
        "tis_clip tis_clip_low",
        lambda args: bool(args.use_tis or args.custom_tis_function_path),
        "has no effect without --use-tis; add --use-tis, or drop {flag}",
        "use_tis",
    ),
    Dependent(
        "rejected_in_denominator",
        lambda args: bool(args.custom_tis_function_path),
        "has no effect without --custom-tis-function-path: nothing else rejects tokens; drop {flag}",
    ),
    Dependent(
        "min_lr lr_decay_steps",
        lambda args: args.lr_decay_style != "constant",
        "has no effect without --lr-decay-style linear or cosine; add it, or drop {flag}",
    ),
    Dependent(
        "disable_grpo_std_normalization",
        lambda args: args.advantage_estimator in _NORMALISED,
        f"has an effect only with --advantage-estimator {', '.join(_NORMALISED)}; drop {{flag}}",
    ),
    Dependent(
        "eps_clip_c",
        lambda args: args.advantage_estimator not in ("cispo", "importance_sampling"),
        "has no effect with --advantage-estimator cispo or importance_sampling; drop {flag}",
    ),
    Dependent(
        "label_smoothing",
        lambda args: args.loss_type == "sft",
        "has an effect only with --loss-type sft; add it, or drop {flag}",
    ),
    Dependent(
        "prompt_template use_kl_loss use_tis kl_coef overlong_buffer_len score_old_log_probs entropy_coef eps_clip_c "
        "disable_grpo_std_normalization dynamic_sampling_filter_path eval_interval max_logprob_diff",
        lambda args: args.loss_type != "sft",
        "has no effect with --loss-type sft; drop {flag}",
    ),
)


def ineffective_flags(args: AllFlags, given: Collection[str]) -> Iterator[str]:
    """A sentence for each flag that was set but has no effect. `given`: the fields that the command line names."""
    for row in TABLE:
        if row.works(args) or (row.switch in given and not getattr(args, row.switch or "")):
            continue
        for name in row.names.split():
            if getattr(args, name) and _is_set(args, name, given, by_name=row.switch is not None):
                yield f"{flag(name)} {row.why.format(flag=flag(name))}"


def _is_set(args: AllFlags, name: str, given: Collection[str], *, by_name: bool) -> bool:
    """Whether somebody chose the value: it is not the default, or (`by_name`) the command line names the flag.

    A default that is computed tells nothing: a file with all values of a run may hold that of another one.
    """
    field: FieldInfo = type(args).model_fields[name]
    if field.default_factory is not None and name != "apply_chat_template_kwargs":
        return name in given
    return getattr(args, name) != field.default or (by_name and name in given)
