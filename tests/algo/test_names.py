"""The choices of flags are the names that the algorithms know: neither side has one that the other lacks."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from sleuth.algo.estimators import Estimator
from sleuth.algo.losses import KLKind
from sleuth.arguments import Args


@pytest.mark.parametrize(
    ("field", "names"),
    [("advantage_estimator", Estimator), ("kl_loss_type", KLKind), ("kl_penalty_type", KLKind)],
)
def test_choices_are_the_known_names_in_their_order(field: str, names: Any) -> None:
    assert get_args(Args.model_fields[field].annotation) == get_args(names)
