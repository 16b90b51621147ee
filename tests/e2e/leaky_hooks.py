"""A generate hook that lets a secret slip, as libraries do: in an error, in a log line, in a note."""

from __future__ import annotations

import logging
from typing import Any

import generate_with_search
from sleuth.sample import Sample

Settings = generate_with_search.SearchSettings  # its section is declared here, too
_failed: list[int] = []


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    custom = args.custom_config["custom"]
    logging.getLogger(__name__).warning("asking with %s", custom["auth"])
    if not _failed:  # once, then the sample is generated anew
        _failed.append(sample.index)
        raise RuntimeError(f"401 from http://alice:{custom['auth']}@judge/score for {custom['credentials']}")
    sample.report(asked_with=custom["auth"])
    return await generate_with_search.generate(args, sample, sampling_params, evaluation=evaluation)
