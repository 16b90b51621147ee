"""Token losses against numpy, gradients against finite differences, and what masks keep out."""

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from sleuth.algo.losses import kl_estimate, masked, policy_loss, truncated_importance_weights, weighted_sum

NAN = float("nan")
CLIP = {"eps_clip": 0.2, "eps_clip_high": 0.28}


def random_tokens(seed: int = 0, n: int = 200, scale: float = 0.5):
    """New and old log-probabilities with ratios on both sides of every bound, and advantages."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.0, n)
    new = old + rng.normal(0, scale, n)
    return tuple(torch.tensor(x) for x in (new, old, rng.normal(0, 1, n)))


def policy_reference(new, old, advantages, low, high, c=None):
    losses, clipped = [], []
    for n, o, a in zip(new, old, advantages, strict=True):
        ratio = np.exp(n - o)
        surrogate = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
        cut = (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low)
        if c is not None and a < 0 and surrogate < c * a:
            surrogate, cut = c * a, True
        losses.append(-surrogate)
        clipped.append(cut)
    return np.array(losses), np.array(clipped)


@pytest.mark.parametrize("c", [None, 1.5, 3.0])
def test_policy_loss_equals_numpy(c):
    new, old, advantages = random_tokens()
    found = policy_loss(new, old, advantages, eps_clip_c=c, **CLIP)
    loss, clipped = policy_reference(new.numpy(), old.numpy(), advantages.numpy(), 0.2, 0.28, c)
    np.testing.assert_allclose(found.loss.numpy(), loss, rtol=1e-12)
    np.testing.assert_array_equal(found.clipped.numpy(), clipped)
    np.testing.assert_allclose(found.ratio.numpy(), np.exp(new.numpy() - old.numpy()), rtol=1e-12)
    assert 0 < clipped.sum() < len(clipped)


@pytest.mark.parametrize("c", [None, 1.5])
def test_policy_loss_gradient(c):
    new, old, advantages = random_tokens(1)
    assert gradcheck(lambda x: policy_loss(x, old, advantages, eps_clip_c=c, **CLIP).loss, new.requires_grad_())


def test_clipped_tokens_have_no_gradient_and_others_do():
    new, old, advantages = random_tokens(2)
    new.requires_grad_()
    found = policy_loss(new, old, advantages, eps_clip_c=1.5, **CLIP)
    found.loss.sum().backward()
    assert torch.equal(new.grad == 0, found.clipped)


def test_on_policy_gradient_is_that_of_reinforce():
    new, _, advantages = random_tokens(3)
    new.requires_grad_()
    policy_loss(new, new.detach(), advantages, **CLIP).loss.sum().backward()
    torch.testing.assert_close(new.grad, -advantages)


def test_only_the_new_log_probs_get_a_gradient():
    tensors = [t.requires_grad_() for t in random_tokens(4)]
    policy_loss(*tensors, **CLIP).loss.sum().backward()
    assert tensors[0].grad is not None
    assert tensors[1].grad is None
    assert tensors[2].grad is None


def test_extreme_ratios_stay_finite():
    new = torch.tensor([-1000.0, 0.0], requires_grad=True)
    found = policy_loss(new, torch.tensor([0.0, -1000.0]), torch.tensor([1.0, -1.0]), **CLIP)
    found.loss.sum().backward()
    assert found.loss.isfinite().all()
    assert new.grad.isfinite().all()


def test_dual_clip_bound_must_exceed_one():
    with pytest.raises(ValueError, match="eps_clip_c > 1"):
        policy_loss(*random_tokens(), eps_clip_c=1.0, **CLIP)


KL_REFERENCES = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: np.exp(-d) - 1 + d,
    "low_var_kl": lambda d: np.minimum(np.exp(-d) - 1 + d, 10.0),
}


@pytest.mark.parametrize("kind", KL_REFERENCES)
def test_kl_equals_numpy(kind):
    new, ref, _ = random_tokens(5, scale=2.0)
    found = kl_estimate(new, ref, kind)
    np.testing.assert_allclose(found.numpy(), KL_REFERENCES[kind](new.numpy() - ref.numpy()), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KL_REFERENCES)
def test_kl_gradient(kind):
    new, ref, _ = random_tokens(6, scale=1.0)
    assert gradcheck(lambda x: kl_estimate(x, ref, kind), new.requires_grad_())


def test_low_var_kl_is_bounded_where_k3_is_not():
    new, ref = torch.tensor([-6.0]), torch.tensor([-1.0])
    assert kl_estimate(new, ref, "k3").item() == pytest.approx(np.exp(5) - 6, rel=1e-6)
    assert kl_estimate(new, ref, "low_var_kl").item() == 10.0


@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
def test_kl_exponent_is_bounded(kind):
    new = torch.tensor([-1000.0, 0.0], requires_grad=True)
    found = kl_estimate(new, torch.tensor([0.0, -1000.0]), kind)
    found.sum().backward()
    assert found.isfinite().all()
    assert new.grad.isfinite().all()


def test_k3_of_float32_is_never_negative():
    new = -torch.rand(10_000)
    assert (kl_estimate(new, new + 1e-5 * torch.randn(10_000), "k3") >= 0).all()


def test_k1_and_k3_estimate_the_kl_of_a_known_distribution():
    policy, ref = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    exact = (policy * (policy / ref).log()).sum()
    for kind in ("k1", "k3"):  # both are unbiased: their expectation under the policy is the KL
        torch.testing.assert_close((policy * kl_estimate(policy.log(), ref.log(), kind)).sum(), exact)


def test_unknown_kl_names_the_choices():
    with pytest.raises(ValueError, match=r"k1, k2, k3, low_var_kl; found 'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_importance_weights_equal_numpy():
    train, rollout, _ = random_tokens(7, scale=1.0)
    found = truncated_importance_weights(train.requires_grad_(), rollout, 0.5, 2.0)
    expected = np.clip(np.exp(train.detach().numpy() - rollout.numpy()), 0.5, 2.0)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    assert not found.requires_grad
    assert {0.5, 2.0} <= set(found.tolist())


def test_importance_weight_bounds_must_be_ordered():
    with pytest.raises(ValueError, match=r"low=2\.0, high=0\.5"):
        truncated_importance_weights(torch.zeros(1), torch.zeros(1), 2.0, 0.5)


MASKED_LOSSES = {
    "policy": lambda new, old, adv, mask: policy_loss(new, old, adv, mask=mask, **CLIP).loss,
    "dual clip": lambda new, old, adv, mask: policy_loss(new, old, adv, mask=mask, eps_clip_c=2.0, **CLIP).loss,
    **{
        kind: lambda new, old, adv, mask, kind=kind: kl_estimate(new, old, kind, mask=mask)
        for kind in KL_REFERENCES
    },
}  # fmt: skip


@pytest.mark.parametrize("junk", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("name", MASKED_LOSSES)
def test_masked_positions_never_matter(name, junk):
    loss_of = MASKED_LOSSES[name]
    new, old, advantages = random_tokens(8, n=20)
    mask = torch.arange(20) % 3 > 0
    poisoned = [torch.where(mask, t, junk).requires_grad_() for t in (new, old, advantages)]
    found = loss_of(*poisoned, mask)
    weighted_sum(found, mask.double()).backward()

    kept = new[mask].requires_grad_()
    expected = loss_of(kept, old[mask], advantages[mask], torch.ones(int(mask.sum())))
    expected.sum().backward()
    torch.testing.assert_close(found[mask], expected)
    assert (found[~mask] == 0).all()
    torch.testing.assert_close(poisoned[0].grad[mask], kept.grad)
    assert (poisoned[0].grad[~mask] == 0).all()


def test_masked_diagnostics_are_zero():
    new, old, advantages = (torch.full((2,), NAN) for _ in range(3))
    found = policy_loss(new, old, advantages, mask=torch.zeros(2), **CLIP)
    assert found.ratio.tolist() == [0.0, 0.0]
    assert found.clipped.tolist() == [False, False]
    assert truncated_importance_weights(new, old, 0.0, 2.0, mask=torch.zeros(2)).tolist() == [0.0, 0.0]


def test_weighted_sum_selects():
    values = torch.tensor([1.0, NAN, 3.0], requires_grad=True)
    total = weighted_sum(values, torch.tensor([0.5, 0.0, 2.0]))
    total.backward()
    assert total.item() == 6.5
    assert values.grad.tolist() == [0.5, 0.0, 2.0]


def test_masked_without_a_mask_is_the_identity():
    values = torch.tensor([1.0, NAN])
    assert masked(values, None) is values
