"""A generate hook that lets a secret slip, as libraries do: in an error, in a log line, in a note."""

from __future__ import annotations

import logging
from typing import Any

import generate_with_search
from sleuth.sample import Sample

generate_settings = generate_with_search.SearchSettings  # its section is declared here, too


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    auth = args.custom_config["custom"]["auth"]
    logging.getLogger(__name__).warning("asking with %s", auth)
    if sample.index == 0 and not evaluation:
        raise RuntimeError(
            f"401 from http://alice:{auth}@judge/score for {args.custom_config['custom']['credentials']}"
        )
    sample.report(asked_with=auth)
    return await generate_with_search.generate(args, sample, sampling_params, evaluation=evaluation)
