"""The penalty of over-long responses against numpy."""

import numpy as np
import pytest
import torch

from sleuth.algo.overlong import overlong_penalty


def test_equals_numpy():
    lengths = np.arange(0, 1200, 7)
    expected = [0.0 if n <= 700 else max((700 - n) / 300, -1.0) * 0.5 for n in lengths]
    found = overlong_penalty(torch.tensor(lengths), max_length=1000, buffer=300, factor=0.5)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_corners():
    found = overlong_penalty(torch.tensor([700, 850, 1000, 5000]), max_length=1000, buffer=300)
    np.testing.assert_allclose(found.numpy(), [0.0, -0.5, -1.0, -1.0])


@pytest.mark.parametrize("buffer", [0, 1001])
def test_buffer_must_lie_within_the_length(buffer):
    with pytest.raises(ValueError, match=f"found a buffer of {buffer}"):
        overlong_penalty(torch.tensor([1]), max_length=1000, buffer=buffer)


def test_penalty_must_not_be_a_bonus():
    with pytest.raises(ValueError, match="factor >= 0"):
        overlong_penalty(torch.tensor([1]), max_length=10, buffer=5, factor=-1.0)
