"""Which settings decide whether the samples of an interrupted run are those that this run would make."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sleuth.arguments import Args
from sleuth.arguments.run_flags import DataArgs, Group, HookArgs, RolloutArgs
from sleuth.arguments.train_flags import LossArgs, NumericsArgs, OptimizerArgs
from sleuth.hooks import hook_modules

GROUPS: tuple[type[Group], ...] = (DataArgs, RolloutArgs, HookArgs, LossArgs, OptimizerArgs, NumericsArgs)
"""Flags that change the prompts, how they are sampled and scored, or the weights that the training leads to."""
WITHOUT_EFFECT = {
    *("custom_config_path", "hook_timeout", "max_failure_rate", "rollout_max_concurrency"),
    *("debug_rollout_only", "debug_train_only", "rollout_workers"),
}
ADDRESSES = ("url", "host", "port", "address", "proxy")
"""Ends of names of settings that say where a service is, which may differ from start to start."""


def has_journal(args: Args) -> bool:
    """Whether the run keeps its finished samples beside its checkpoints."""
    return args.save is not None and args.rollout_journal and not args.eval_only


def journal_settings(args: Args) -> dict[str, Any]:
    """The values of all such flags and hook settings, and a hash of each hook's file, as JSON holds them."""
    names = {name for group in GROUPS for name in group.model_fields} - WITHOUT_EFFECT
    values: dict[str, Any] = args.model_dump(mode="json", include=names | {"global_batch_size", "hf_checkpoint"})
    values["custom_config"] = _without_addresses(args.custom_config)
    values["hooks"] = {str(module.__name__): _hash(module.__file__) for module in hook_modules(args)}
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def _without_addresses(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_addresses(inner) for key, inner in value.items() if not str(key).endswith(ADDRESSES)}


def _hash(file: str | None) -> str | None:
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest() if file else None
