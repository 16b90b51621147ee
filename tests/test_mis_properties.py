"""Properties of the mismatch correction on random samples: what is masked never matters, nothing is ever NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mis import MisSettings, compute_mis_weights, compute_mis_weights_with_cp

levels = st.sampled_from(["token", "sequence", "geometric"])
configs = st.fixed_dictionaries(
    {
        "use_tis": st.booleans(),
        "use_rs": st.booleans(),
        "tis_level": levels,
        "rs_level": levels,
        "tis_mode": st.sampled_from(["truncate", "mask", "clip"]),
        "tis_upper_bound": st.sampled_from([1.1, 2.0, 1e9, math.inf]),
        "tis_lower_bound": st.sampled_from([None, 0.0, 0.9]),
        "rs_veto_threshold": st.sampled_from([None, 1e-4, 0.5]),
        "tis_batch_normalize": st.booleans(),
    }
).filter(lambda config: config["use_tis"] or config["use_rs"])
finite = st.one_of(
    st.floats(-10, 0, width=32), st.sampled_from([0.0, -1e-7, -700.0, -3e38, 3e38]), st.floats(-100, 100, width=32)
)
broken = st.sampled_from([math.nan, math.inf, -math.inf])
token = st.tuples(finite, finite, st.booleans())
samples = st.lists(st.lists(token, max_size=6), max_size=6)


def lists(drawn: list[list[tuple[float, float, bool]]]) -> dict[str, list[torch.Tensor]]:
    columns = [torch.tensor(sample, dtype=torch.float32).reshape(-1, 3).unbind(1) for sample in drawn]
    names = ("train_log_probs", "rollout_log_probs", "loss_masks")
    return {name: [column[number] for column in columns] for number, name in enumerate(names)}


@given(drawn=samples, config=configs)
@settings(deadline=None, max_examples=150)
def test_weights_masks_and_metrics_are_always_finite_and_within_bounds(drawn: Any, config: dict[str, Any]) -> None:
    batch, checked = lists(drawn), MisSettings(**config)
    weights, masks, metrics = compute_mis_weights(checked, **batch)
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    for weight, mask, old in zip(weights, masks, batch["loss_masks"], strict=True):
        assert weight.shape == mask.shape == old.shape
        assert weight.isfinite().all()
        assert ((mask == old) | (mask == 0)).all(), "a mask only ever loses tokens"
        assert (weight[mask == 0] == 0).all()
        if checked.use_tis and not checked.tis_batch_normalize:
            assert (weight <= min(checked.tis_bounds[1], math.exp(20.0)) * (1 + 1e-6)).all()
            if checked.tis_mode == "clip":
                assert (weight[mask != 0] >= checked.tis_bounds[0] * (1 - 1e-6)).all()


@given(drawn=samples, config=configs, data=st.data())
@settings(deadline=None, max_examples=150)
def test_what_stands_at_masked_tokens_never_matters(drawn: Any, config: dict[str, Any], data: st.DataObject) -> None:
    clean = lists(drawn)
    spoilt = {name: [values.clone() for values in clean[name]] for name in clean}
    for name in ("train_log_probs", "rollout_log_probs"):
        for values, mask in zip(spoilt[name], clean["loss_masks"], strict=True):
            for position in (mask == 0).nonzero().flatten().tolist():
                values[position] = data.draw(broken)
    first, second = (compute_mis_weights(MisSettings(**config), **batch) for batch in (clean, spoilt))
    assert all(torch.equal(a, b) for a, b in zip(first[0] + first[1], second[0] + second[1], strict=True))
    assert first[2] == second[2]


@given(drawn=samples, config=configs, data=st.data())
@settings(deadline=None, max_examples=150)
def test_broken_trainable_tokens_are_counted_and_cost_their_samples(
    drawn: Any, config: dict[str, Any], data: st.DataObject
) -> None:
    batch = lists(drawn)
    bad = 0
    rejected = []
    for number, mask in enumerate(batch["loss_masks"]):
        for position in mask.nonzero().flatten().tolist():
            if data.draw(st.sampled_from([False, False, True])):
                side = data.draw(st.sampled_from(["train_log_probs", "rollout_log_probs"]))
                batch[side][number][position] = data.draw(broken)
                bad += 1
                rejected.append(number)
    others = sum(bool(mask.any()) for n, mask in enumerate(batch["loss_masks"]) if n not in rejected)
    lengths = [len(mask) for mask in batch["loss_masks"]]
    every_sample_is_broken = bad > 0 and not others
    arguments = {"pg_loss": torch.ones(sum(lengths)), "total_lengths": lengths, "response_lengths": lengths}
    if every_sample_is_broken:
        with pytest.raises(FloatingPointError, match="no other sample"):
            compute_mis_weights_with_cp(MisSettings(**config), **arguments, **batch)
        return
    loss, masks, metrics = compute_mis_weights_with_cp(MisSettings(**config), **arguments, **batch)
    assert loss.isfinite().all()
    assert (metrics["mis/nonfinite_tokens"], metrics["mis/nonfinite_samples"]) == (bad, len(set(rejected)))
    assert not any(masks[number].any() for number in rejected)
    assert all(math.isfinite(value) for value in metrics.values())


@given(drawn=samples, config=configs, seed=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=100)
def test_the_order_of_samples_does_not_matter(drawn: Any, config: dict[str, Any], seed: Any) -> None:
    drawn = [[(max(min(a, 50.0), -50.0), max(min(b, 50.0), -50.0), mask) for a, b, mask in part] for part in drawn]
    order = list(range(len(drawn)))
    seed.shuffle(order)
    weights, masks, _ = compute_mis_weights(MisSettings(**config), **lists(drawn))
    shuffled, shuffled_masks, _ = compute_mis_weights(
        MisSettings(**config), **lists([drawn[number] for number in order])
    )
    for place, number in enumerate(order):
        torch.testing.assert_close(shuffled[place], weights[number], rtol=1e-6, atol=0)
        assert torch.equal(shuffled_masks[place], masks[number])
