"""Command lines for tests of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from sleuth.arguments import Args, ArgumentsError, parse_args

BASE = [
    *("--hf-checkpoint", "model", "--prompt-data", "train.parquet", "--colocate"),
    *("--custom-rm-path", "generate_with_search.reward_func"),
]
TIS_HOOK = ["--custom-tis-function-path", "mis.compute_mis_weights_with_cp"]


def parse(*flags: str) -> Args:
    return parse_args([*BASE, *flags])


def error_of(*flags: str) -> str:
    with pytest.raises(ArgumentsError) as caught:
        parse(*flags)
    return str(caught.value)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)
