"""Weights that are not finite are named."""

from __future__ import annotations

import pytest
import torch

import sleuth.megatron  # noqa: F401  (before megatron)
from sleuth.megatron.finite import describe, not_finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_tensor_that_is_not_finite_is_named(value: float, dtype: torch.dtype) -> None:
    tensors = {name: torch.randn(3, 5).to(dtype) for name in "abcd"}
    tensors["empty"] = torch.empty(0)
    tensors["huge"] = torch.full((1000,), 3e38)  # whose sum is not finite
    assert not_finite(tensors.items()) == []
    tensors["b"][1, 2] = tensors["d"][0, 0] = value
    assert not_finite(tensors.items()) == ["b", "d"]
    assert not_finite([]) == []


def test_a_message_names_a_few() -> None:
    assert describe(["a"]) == "NaN or infinite values in a"
    assert describe(list("abcdef")) == "NaN or infinite values in a, b, c, d and 2 more"
