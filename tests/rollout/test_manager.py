"""The rollout side of a run, as far as it needs no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sleuth.rollout.manager import PROBE_TOKENS, RolloutManager


@pytest.mark.parametrize("length", [1, 2, PROBE_TOKENS + 1])
def test_a_probe_has_a_token_to_compare_whatever_the_first_prompt(length: int):
    prompt: Any = SimpleNamespace(prompt_ids=list(range(5, 5 + length)))
    manager: Any = SimpleNamespace(rows=[prompt])
    ids = RolloutManager.probe_ids(manager)
    assert 2 <= len(ids) <= PROBE_TOKENS
    assert set(ids) <= set(prompt.prompt_ids)
