"""Group-normalised rewards against numpy, and their exact zeros."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sleuth.algo.advantages import equal_groups, group_advantages, step_advantages

groups = st.integers(1, 9).flatmap(
    lambda n: st.lists(st.lists(st.floats(-10, 10), min_size=n, max_size=n), min_size=1, max_size=5)
)


def reference(rewards: np.ndarray, normalize_std: bool) -> np.ndarray:
    out = np.zeros_like(rewards)
    for g, row in enumerate(rewards):
        if all(r == row[0] for r in row):
            continue
        out[g] = row - row.mean()
        if normalize_std:
            out[g] /= row.std(ddof=1) + 1e-6
    return out


@pytest.mark.parametrize("normalize_std", [True, False])
@given(rewards=groups)
def test_equals_numpy(normalize_std, rewards):
    expected = reference(np.array(rewards), normalize_std)
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64), normalize_std=normalize_std)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(reward=st.floats(-1e6, 1e6), n=st.integers(1, 17))
def test_equal_rewards_give_exactly_zero(normalize_std, dtype, reward, n):
    rewards = torch.full((3, n), reward, dtype=dtype)
    assert torch.equal(group_advantages(rewards, normalize_std=normalize_std), torch.zeros(3, n, dtype=dtype))


def test_tenths_whose_mean_is_rounded_give_exactly_zero():
    rewards = torch.tensor([[0.1] * 3, [0.7] * 3], dtype=torch.float64)
    assert (rewards.mean(1, keepdim=True) != rewards).any(), "the case that makes plain subtraction leave noise"
    assert torch.equal(group_advantages(rewards, normalize_std=True), torch.zeros(2, 3, dtype=torch.float64))


def test_group_of_one_is_zero_even_with_std():
    assert group_advantages(torch.tensor([[3.0], [-1.0]]), normalize_std=True).tolist() == [[0.0], [0.0]]


def test_one_winner_of_four():
    plain = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), normalize_std=False)
    assert plain.tolist() == [[0.75, -0.25, -0.25, -0.25]]
    scaled = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), normalize_std=True)
    np.testing.assert_allclose(scaled.numpy(), [[1.5, -0.5, -0.5, -0.5]], rtol=1e-5)


def test_integer_rewards_give_floats():
    assert group_advantages(torch.tensor([[0, 1]]), normalize_std=False).tolist() == [[-0.5, 0.5]]


def test_equal_groups_are_found():
    rewards = torch.tensor([[0.1, 0.1], [0.0, 1.0], [1.0, 1.0]])
    assert equal_groups(rewards).tolist() == [True, False, True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_reward_that_is_not_finite_is_named(bad):
    with pytest.raises(ValueError, match="sample 1 in group 0"):
        group_advantages(torch.tensor([[0.0, bad]]), normalize_std=True)


@pytest.mark.parametrize("shape", [(3,), (0, 2), (2, 0), (1, 2, 3)])
def test_wrong_shape_is_named(shape):
    with pytest.raises(ValueError, match="shape"):
        group_advantages(torch.zeros(shape), normalize_std=True)


def step_reference(rewards: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    per_token = np.repeat(rewards.ravel(), tokens.ravel())
    out = (rewards - per_token.mean()) / (per_token.std() + 1e-6)
    return np.where(tokens > 0, out, 0.0)


def test_step_advantages_equal_numpy_over_tokens():
    rng = np.random.default_rng(0)
    rewards, tokens = rng.normal(0, 1, (5, 4)), rng.integers(0, 50, (5, 4))
    found = step_advantages(torch.tensor(rewards), torch.tensor(tokens))
    np.testing.assert_allclose(found.numpy(), step_reference(rewards, tokens), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("rewards", "tokens"),
    [([[0.1] * 3, [0.1] * 3], [[1, 2, 3], [4, 5, 6]]), ([[1.0, 0.1, 0.1]], [[0, 7, 9]]), ([[0.0, 1.0]], [[0, 0]])],
)
def test_step_advantages_are_exactly_zero_without_a_signal(rewards, tokens):
    found = step_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(tokens))
    assert (found == 0).all()


def test_step_advantages_need_a_count_a_sample():
    with pytest.raises(ValueError, match=r"expected tokens of shape \[1, 2\], found \[2\]"):
        step_advantages(torch.zeros(1, 2), torch.ones(2))
