"""Packed rows entry by entry, and a loss that no layout changes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sleuth.algo.context_parallel import zigzag_index
from sleuth.algo.losses import weighted_sum
from sleuth.algo.optimizer_steps import OptimizerStepBatch, pack, plan_optimizer_steps, split_optimizer_steps
from sleuth.sample import TrainSample


def make_sample(prompt: int, response: int, seed: int) -> TrainSample:
    rng = np.random.default_rng(seed)
    return TrainSample(
        token_ids=rng.integers(1, 500, prompt + response).tolist(),
        prompt_length=prompt,
        loss_mask=rng.integers(0, 2, response).astype(float).tolist(),
        rollout_log_probs=(-rng.exponential(1.0, response)).tolist(),
        advantages=rng.normal(0, 1, response).tolist(),
    )


samples_strategy = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=8).map(
    lambda shapes: [make_sample(prompt, response, i) for i, (prompt, response) in enumerate(shapes)]
)


@given(samples=samples_strategy, multiple=st.integers(1, 8))
def test_every_entry_concerns_the_next_token(samples, multiple):
    packed = pack(samples, pad_multiple=multiple)
    row = 0
    for number, sample in enumerate(samples):
        total = len(sample.token_ids)
        padded = -(-total // multiple) * multiple
        for t in range(padded):
            response = t + 1 - sample.prompt_length  # the response token that entry t predicts
            trained = 0 <= response < len(sample.loss_mask)
            at = row + t
            assert packed.sample_ids[at] == number
            assert packed.position_ids[at] == t
            assert packed.input_ids[at] == (sample.token_ids[t] if t < total else 0)
            assert packed.targets[at] == (sample.token_ids[t + 1] if t + 1 < total else 0)
            assert packed.loss_mask[at] == (sample.loss_mask[response] if trained else 0)
            assert packed.advantages[at].item() == pytest.approx(sample.advantages[response] if trained else 0)
            expected = sample.rollout_log_probs[response] if trained else 0
            assert packed.rollout_log_probs[at].item() == pytest.approx(expected)
        row += padded
    assert len(packed) == row == sum(packed.lengths)
    assert packed.cu_seqlens.tolist() == [0, *np.cumsum(packed.lengths)]
    assert packed.total_lengths == [len(sample.token_ids) for sample in samples]
    assert packed.num_samples == len(samples)


@given(samples=samples_strategy, multiple=st.integers(1, 8))
def test_responses_are_split_and_joined(samples, multiple):
    packed = pack(samples, pad_multiple=multiple)
    parts = packed.split_responses(packed.loss_mask)
    assert [part.tolist() for part in parts] == [sample.loss_mask for sample in samples]
    assert torch.equal(packed.join_responses(parts), packed.loss_mask)
    labels = packed.split_responses(packed.targets)
    assert [part.tolist() for part in labels] == [sample.token_ids[sample.prompt_length :] for sample in samples]


def test_supervised_samples_need_neither_log_probs_nor_advantages():
    packed = pack([TrainSample([7, 8, 9], 1, [0.25, 1.0])])
    assert packed.loss_mask.tolist() == [0.25, 1.0, 0.0]
    assert packed.advantages.tolist() == packed.rollout_log_probs.tolist() == [0.0, 0.0, 0.0]


def test_no_samples_give_padding_without_weight():
    packed = pack([], pad_multiple=4)
    step = OptimizerStepBatch([[]], num_samples=3, num_tokens=5.0)
    assert len(packed) == 4
    assert packed.cu_seqlens.tolist() == [0, 4]
    assert step.token_weights(packed).tolist() == step.token_weights(packed, per_token=True).tolist() == [0.0] * 4
    assert [len(part) for part in packed.split_responses(packed.targets)] == [0]


def test_slice_takes_every_tensor_and_keeps_the_description():
    packed = pack([make_sample(3, 5, 0), make_sample(2, 9, 1)], pad_multiple=4)
    index = zigzag_index(packed.lengths, 2, 1)
    part = packed.slice(index)
    assert torch.equal(part.input_ids, packed.input_ids[index])
    assert torch.equal(part.sample_mean_weights, packed.sample_mean_weights[index])
    assert len(part) == len(packed) // 2
    assert part.lengths == packed.lengths
    assert torch.equal(part.cu_seqlens, packed.cu_seqlens)


def test_moving_to_a_device_keeps_everything():
    packed = pack([make_sample(3, 5, 0)])
    moved = packed.to("cpu")
    assert torch.equal(moved.input_ids, packed.input_ids)
    assert moved.lengths == packed.lengths


def token_losses(packed):
    """Some loss that depends on the token and its position only."""
    return torch.sin(packed.targets.double() * 1.7 + packed.position_ids)


def reference_loss(samples, per_token):
    total, count = 0.0, 0.0
    for sample in samples:
        mask = np.array(sample.loss_mask)
        positions = np.arange(sample.prompt_length - 1, len(sample.token_ids) - 1)
        losses = np.sin(np.array(sample.token_ids[sample.prompt_length :]) * 1.7 + positions)
        if per_token:
            total, count = total + (mask * losses).sum(), count + mask.sum()
        else:
            total, count = total + ((mask * losses).sum() / mask.sum() if mask.sum() else 0.0), count + 1
    return total / count if count else 0.0


@settings(max_examples=40)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 30)), min_size=4, max_size=12),
    ranks=st.integers(1, 4),
    cp=st.sampled_from([1, 2, 3]),
    limit=st.sampled_from([{"max_tokens": 40}, {"max_tokens": 200}, {"micro_batch_size": 2}]),
    balance=st.booleans(),
    per_token=st.booleans(),
)
def test_the_loss_does_not_depend_on_layout(shapes, ranks, cp, limit, balance, per_token):
    samples = [make_sample(prompt, response, i) for i, (prompt, response) in enumerate(shapes)]
    multiple = 1 if cp == 1 else 2 * cp
    plan = plan_optimizer_steps(
        samples, global_batch_size=len(samples), num_ranks=ranks, balance=balance, pad_multiple=multiple, **limit
    )
    total = torch.zeros((), dtype=torch.float64)
    for (step,) in plan:
        for micro_batch in step.micro_batches:
            packed = pack(micro_batch, pad_multiple=multiple)
            for rank in range(cp):
                part = packed.slice(zigzag_index(packed.lengths, cp, rank))
                total += weighted_sum(token_losses(part), step.token_weights(part, per_token=per_token).double())
    assert total.item() == pytest.approx(reference_loss(samples, per_token), abs=1e-5)


def test_optimizer_steps_keep_order_and_carry_global_counts():
    samples = [TrainSample([1, 2, 3], 1, [1.0, float(i % 2)]) for i in range(8)]
    plan = plan_optimizer_steps(samples, global_batch_size=4, num_ranks=2, max_tokens=100)
    assert [len(rank) for rank in plan] == [2, 2]
    for number in range(2):
        steps = [rank[number] for rank in plan]
        assert {(step.num_samples, step.num_tokens) for step in steps} == {(4, 6.0)}
        held = [id(sample) for step in steps for batch in step.micro_batches for sample in batch]
        assert sorted(held) == sorted(id(sample) for sample in samples[4 * number : 4 * number + 4])


def test_split_optimizer_steps():
    assert split_optimizer_steps([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]


@pytest.mark.parametrize(("count", "size"), [(10, 4), (0, 4), (4, 0)])
def test_samples_that_do_not_divide_are_named(count, size):
    with pytest.raises(ValueError, match=f"--global-batch-size {size}, found {count} samples"):
        split_optimizer_steps(list(range(count)), size)
