"""Whether a model is evaluated as its run trained it: with other hooks or settings its numbers say little about it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sleuth.arguments import Args
from sleuth.checkpoints import CONFIGURATION, find_checkpoint
from sleuth.secrets import masked
from tools.evaluation.answers import differences

NAMES = (
    "custom_generate_function_path",
    "custom_rm_path",
    "prompt_template",
    "apply_chat_template",
    "eval_max_response_len",
    "rollout_max_context_len",
)
"""What is compared besides the hooks' settings."""
ELSEWHERE = ("url", "key", "proxy", "concurrency", "timeout", "retries", "cache_size", "failure_rate", "backend")
"""Ends of the names of settings that say where and how services are asked, not what the model sees."""
SHOWN = 4


def other_settings(args: Args, hf_folder: str) -> str | None:
    """A sentence, if the run that made the model had other settings than this evaluation; None if none is known.

    `args` have all hook settings filled in. Of a checkpoint the settings lie in it, of an exported model beside it.
    """
    checkpoint = None if args.load is None else find_checkpoint(args.load)
    path = (Path(hf_folder).parent if args.load is None else checkpoint or args.load) / CONFIGURATION
    try:
        trained = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    if not isinstance(trained, dict) or "hf_checkpoint" not in trained:
        return None
    now = {name: getattr(args, name) for name in NAMES} | masked(args.custom_config)
    shared = {name: value for name, value in now.items() if name in trained}
    changed = differences(_seen({name: trained[name] for name in shared}), _seen(shared))
    if not changed:
        return None
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return (
        f"the model was trained with other settings than it is evaluated with: {'; '.join(changed[:SHOWN])}{more}; "
        f"--custom-config-path {path} takes those of its run"
    )


def _seen(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those of ELSEWHERE, at every depth."""
    return {
        name: _seen(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if not name.endswith(ELSEWHERE)
    }
