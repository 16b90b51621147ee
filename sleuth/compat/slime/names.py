"""Which modules of slime have stand-ins, and which names they hold."""

from __future__ import annotations

from typing import Any

from sleuth.compat.slime.engine import GenerateState, get, get_model_url, post
from sleuth.compat.slime.rewards import async_rm, batched_async_rm
from sleuth.compat.slime.types import Sample

NAMES: dict[str, dict[str, Any]] = {
    "slime.utils.types": {"Sample": Sample},
    "slime.utils.http_utils": {"post": post, "get": get},
    "slime.rollout.sglang_rollout": {"GenerateState": GenerateState, "get_model_url": get_model_url},
    "slime.rollout.rm_hub": {"async_rm": async_rm, "batched_async_rm": batched_async_rm},
}
