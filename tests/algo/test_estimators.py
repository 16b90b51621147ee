"""GSPO, CISPO, importance sampling and the choice between estimators: numpy, finite differences, layouts."""

from typing import get_args

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from sleuth.algo.advantages import group_advantages, step_advantages
from sleuth.algo.context_parallel import zigzag_index
from sleuth.algo.estimators import (
    cispo_loss,
    estimate_advantages,
    estimator_loss,
    gspo_loss,
    importance_sampling_loss,
)
from sleuth.algo.losses import policy_loss, weighted_sum
from sleuth.algo.names import Estimator
from sleuth.algo.sequences import sample_mean_weights, sequence_sums

LENGTHS = [8, 4, 12, 4, 8]
NUM = len(LENGTHS)
IDS = torch.arange(NUM).repeat_interleave(torch.tensor(LENGTHS))
CLIP = {"eps_clip": 0.1, "eps_clip_high": 0.15}
NAN = float("nan")


def tokens(seed: int = 0):
    """New and old log-probabilities, one advantage a sequence, and a mask that leaves out every third token."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.0, len(IDS))
    new = old + rng.normal(0, 0.3, len(IDS)) + rng.normal(0, 0.2, NUM)[IDS.numpy()]
    advantages = rng.normal(0, 1, NUM)[IDS.numpy()]
    return (*(torch.tensor(x) for x in (new, old, advantages)), torch.arange(len(IDS)) % 3 > 0)


def gspo_reference(new, old, advantages, mask, c=None):
    """Loss of each sequence, from its definition."""
    losses = []
    for s in range(NUM):
        own = (s == IDS.numpy()) & mask
        ratio, advantage = np.exp((new - old)[own].mean()), advantages[own][0]
        surrogate = min(ratio * advantage, np.clip(ratio, 0.9, 1.15) * advantage)
        losses.append(-max(surrogate, c * advantage) if c and advantage < 0 else -surrogate)
    return np.array(losses)


def gspo(new, old, advantages, mask, **options):
    return gspo_loss(new, old, advantages, mask=mask, sample_ids=IDS, num_sequences=NUM, **CLIP, **options)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("c", [None, 1.05])
def test_gspo_equals_the_sequence_form(seed, c):
    new, old, advantages, mask = tokens(seed)
    found = gspo(new, old, advantages, mask, eps_clip_c=c)
    expected = gspo_reference(*(t.numpy() for t in (new, old, advantages, mask)), c)
    np.testing.assert_allclose(found.loss[mask].numpy(), expected[IDS[mask].numpy()], rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_gspo_gradient_is_that_of_the_sequence_form(seed):
    new, old, advantages, mask = tokens(seed)
    weights = sample_mean_weights(mask.double(), IDS, NUM) * torch.tensor([1.0, 0.5, 2.0, 1.0, 3.0])[IDS]

    def loss(x):
        return weighted_sum(gspo(x, old, advantages, mask).loss, weights)

    assert gradcheck(loss, new.requires_grad_())


def test_gspo_clips_whole_sequences():
    found = [gspo(*tokens(seed)) for seed in range(10)]
    clipped = torch.stack([sequence_sums(f.clipped.double(), IDS, NUM) for f in found])
    counts = sequence_sums(tokens()[3].double(), IDS, NUM)
    assert ((clipped == 0) | (clipped == counts)).all()
    assert 0 < (clipped > 0).sum() < clipped.numel()


def test_gspo_over_context_parallel_ranks():
    new, old, advantages, mask = tokens(3)
    weights = sample_mean_weights(mask.double(), IDS, NUM)
    whole = new.clone().requires_grad_()
    expected = gspo(whole, old, advantages, mask)
    weighted_sum(expected.loss, weights).backward()

    indices = [zigzag_index(LENGTHS, 2, rank) for rank in range(2)]
    local_sums = []

    def part_loss(x, index, reduce):
        return gspo_loss(
            x, old[index], advantages[index], mask=mask[index], sample_ids=IDS[index], num_sequences=NUM,
            reduce=reduce, **CLIP,
        )  # fmt: skip

    for index in indices:
        part_loss(new[index], index, lambda sums: local_sums.append(sums.clone()) or sums)
    for index in indices:
        part = new[index].requires_grad_()
        found = part_loss(part, index, lambda sums: sum(local_sums))
        weighted_sum(found.loss, weights[index]).backward()
        torch.testing.assert_close(found.loss, expected.loss[index])
        torch.testing.assert_close(part.grad, whole.grad[index])


def test_cispo_equals_numpy():
    new, old, advantages, _ = tokens(1)
    found = cispo_loss(new, old, advantages, eps_clip_high=0.15)
    ratio = np.exp(new.numpy() - old.numpy())
    np.testing.assert_allclose(found.loss.numpy(), -np.minimum(ratio, 1.15) * advantages.numpy() * new.numpy())
    np.testing.assert_array_equal(found.clipped.numpy(), ratio > 1.15)


def test_cispo_gradient_keeps_the_weight_fixed():
    new, old, advantages, _ = tokens(2)
    weight = cispo_loss(new, old, advantages, eps_clip_high=0.15).ratio.clamp(max=1.15)
    cispo_loss(new.requires_grad_(), old, advantages, eps_clip_high=0.15).loss.sum().backward()
    step = 1e-6  # finite differences of weight x log-probability, the weight held where it was
    up, down = (-weight * advantages * (new.detach() + sign * step) for sign in (1, -1))
    torch.testing.assert_close(new.grad, (up - down) / (2 * step), rtol=1e-6, atol=1e-9)
    assert (new.grad != 0).all()


def test_importance_sampling_equals_numpy():
    new, sampled, advantages, _ = tokens(4)
    found = importance_sampling_loss(new, sampled, advantages)
    np.testing.assert_allclose(found.loss.numpy(), -np.exp(new.numpy() - sampled.numpy()) * advantages.numpy())
    assert not found.clipped.any()


def test_importance_sampling_gradient():
    new, sampled, advantages, _ = tokens(5)
    assert gradcheck(lambda x: importance_sampling_loss(x, sampled, advantages).loss, new.requires_grad_())


def choose(estimator, new, old, rollout, advantages, mask):
    return estimator_loss(
        estimator, new, old_log_probs=old, rollout_log_probs=rollout, advantages=advantages, mask=mask,
        sample_ids=IDS, num_sequences=NUM, **CLIP,
    )  # fmt: skip


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_masked_positions_never_matter(estimator):
    new, old, advantages, mask = tokens(6)
    rollout = old + 0.1
    poisoned = [torch.where(mask, t, NAN).requires_grad_() for t in (new, old, rollout, advantages)]
    clean = [torch.where(mask, t, 0.0).requires_grad_() for t in (new, old, rollout, advantages)]
    found, expected = choose(estimator, *poisoned, mask), choose(estimator, *clean, mask)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert (one[~mask] == 0).all()
    for result in (found, expected):
        weighted_sum(result.loss, mask.double()).backward()
    assert torch.equal(poisoned[0].grad, clean[0].grad)
    assert (poisoned[0].grad[~mask] == 0).all()
    assert all(t.grad is None for t in poisoned[1:])


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_extreme_ratios_stay_finite(estimator):
    _, old, advantages, mask = tokens(7)
    for shift in (-1000.0, 1000.0):
        new = (old + shift).requires_grad_()
        found = choose(estimator, new, old, old, advantages, mask)
        found.loss.sum().backward()
        assert found.loss.isfinite().all()
        assert new.grad.isfinite().all()


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_all_estimators_agree_on_policy(estimator):
    """With new = old = sampled, every one is the plain policy gradient."""
    new, _, advantages, mask = tokens(8)
    new.requires_grad_()
    fixed = new.detach()
    weights = sample_mean_weights(mask.double(), IDS, NUM)
    weighted_sum(choose(estimator, new, fixed, fixed, advantages, mask).loss, weights).backward()
    torch.testing.assert_close(new.grad, -advantages * weights)


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_token_level_estimators_use_the_clipped_surrogate(estimator):
    new, old, advantages, mask = tokens(9)
    found = choose(estimator, new, old, torch.full_like(old, NAN), advantages, mask)
    assert torch.equal(found.loss, policy_loss(new, old, advantages, mask=mask, **CLIP).loss)


REWARDS = torch.tensor([[1.0, 0.0, 0.0], [0.3, 0.2, 0.9]], dtype=torch.float64)
COUNTS = torch.tensor([[5, 7, 9], [1, 2, 30]])


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_group_estimators_normalise_in_the_group(estimator, normalize_std):
    found = estimate_advantages(estimator, REWARDS, COUNTS, normalize_std=normalize_std)
    assert torch.equal(found, group_advantages(REWARDS, normalize_std=normalize_std))


def test_importance_sampling_only_subtracts_the_mean():
    found = estimate_advantages("importance_sampling", REWARDS, COUNTS, normalize_std=True)
    np.testing.assert_allclose(found.numpy(), REWARDS.numpy() - REWARDS.numpy().mean(1, keepdims=True))


def test_reinforce_plus_plus_normalises_over_the_step():
    plain = estimate_advantages("reinforce_plus_plus", REWARDS, COUNTS, normalize_std=True)
    assert torch.equal(plain, step_advantages(REWARDS, COUNTS))
    baseline = estimate_advantages("reinforce_plus_plus_baseline", REWARDS, COUNTS, normalize_std=True)
    centered = REWARDS - REWARDS.mean(1, keepdim=True)
    torch.testing.assert_close(baseline, step_advantages(centered, COUNTS))
    per_token = np.repeat(baseline.numpy().ravel(), COUNTS.numpy().ravel())
    np.testing.assert_allclose([per_token.mean(), per_token.std()], [0.0, 1.0], atol=1e-4)


def test_unknown_estimator_names_the_choices():
    with pytest.raises(ValueError, match=r"grpo, gspo, cispo.*found 'ppo'"):
        estimate_advantages("ppo", REWARDS, COUNTS, normalize_std=True)
    new, old, advantages, mask = tokens()
    with pytest.raises(ValueError, match="found 'ppo'"):
        choose("ppo", new, old, old, advantages, mask)
