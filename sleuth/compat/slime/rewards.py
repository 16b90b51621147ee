"""`async_rm`: how a hook written for slime asks for the reward of a sample."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sleuth.compat.slime.types import Sample
from sleuth.hooks.loader import load_hook


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """What the hook of `--custom-rm-path`, one written for slime, says of a sample.

    ValueError for a reward that slime has built in (`rm_type`): those are not here.
    """
    kind = getattr(args, "rm_type", None) or (sample.metadata or {}).get("rm_type")
    if kind:
        raise ValueError(
            f"rm_type {kind}: expected a reward hook, found one that slime has built in; write it as a hook and name "
            "it with --custom-rm-path"
        )
    return await load_hook(args.custom_rm_path, "reward")(args, sample, **kwargs)


async def batched_async_rm(args: Any, samples: Sequence[Sample], **kwargs: Any) -> list[Any]:
    """The rewards of several samples, each on its own."""
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))
