"""The choices of flags are the names that the algorithms know, and flags do not import the algorithms for them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args

import pytest

from sleuth.algo.names import Estimator, KLKind
from sleuth.arguments import Args


@pytest.mark.parametrize(
    ("field", "names"),
    [("advantage_estimator", Estimator), ("kl_loss_type", KLKind), ("kl_penalty_type", KLKind)],
)
def test_choices_are_the_known_names_in_their_order(field: str, names: Any) -> None:
    assert get_args(Args.model_fields[field].annotation) == get_args(names)


def test_the_flags_do_without_torch() -> None:
    code = "import sys, sleuth.arguments; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
