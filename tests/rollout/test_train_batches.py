"""From scored groups to training samples: advantages by estimator, alignment, shares of the ranks."""

from types import SimpleNamespace

import pytest

from sleuth.rollout.train_batches import shard_batch, train_samples
from sleuth.sample import Sample, TokenTrace


def sample(reward: float, model_tokens: int) -> Sample:
    trace = TokenTrace([7, 8])
    trace.append_model(list(range(model_tokens)), [-0.5] * model_tokens)
    trace.append_observation([1, 2, 3])
    return Sample(0, 0, "p", trace, reward=reward)


def arguments(**changes) -> SimpleNamespace:
    values = {
        "advantage_estimator": "grpo",
        "kl_coef": 0.0,
        "disable_grpo_std_normalization": False,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 64,
        "micro_batch_size": 1,
        "balance_data": True,
        "global_batch_size": 4,
        "data_parallel_size": 2,
        "context_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
    }
    return SimpleNamespace(**(values | changes))


GROUPS = [[sample(1.0, 4), sample(0.0, 2)], [sample(0.2, 3), sample(0.2, 5)]]


@pytest.mark.parametrize(
    ("estimator", "std_off", "expected"),
    [
        ("grpo", True, [0.5, -0.5, 0.0, 0.0]),
        ("importance_sampling", False, [0.5, -0.5, 0.0, 0.0]),
        # Over the 14 trained tokens: mean 4 + 0.2 * 8 = 5.6 / 14 = 0.4, so every advantage is (reward - 0.4) / std.
        ("reinforce_plus_plus", False, None),
    ],
)
def test_advantages_follow_the_estimator(estimator, std_off, expected):
    args = arguments(advantage_estimator=estimator, disable_grpo_std_normalization=std_off)
    samples = train_samples(args, GROUPS)
    found = [s.advantages[0] for s in samples]
    if expected is None:
        values, weights = [1.0, 0.0, 0.2, 0.2], [4, 2, 3, 5]
        variance = sum(w * (v - 0.4) ** 2 for v, w in zip(values, weights, strict=True)) / 14
        expected = [(v - 0.4) / variance**0.5 for v in values]
        assert found == pytest.approx(expected, rel=0.05)  # biased or unbiased variance over 14 tokens
        assert sum(a * w for a, w in zip(found, weights, strict=True)) == pytest.approx(0.0, abs=1e-6)
    else:
        assert found == pytest.approx(expected)


def test_with_a_penalty_to_come_advantages_are_left_to_the_trainer():
    samples = train_samples(arguments(kl_coef=0.1), GROUPS)
    assert [s.advantages for s in samples] == [[]] * 4
    assert [(s.index, s.reward) for s in samples] == [(0, 1.0), (1, 0.0), (2, 0.2), (3, 0.2)]


def test_a_training_sample_is_the_trace():
    trained = train_samples(arguments(), GROUPS)[0]
    assert trained.token_ids == [7, 8, 0, 1, 2, 3, 1, 2, 3]
    assert trained.prompt_length == 2
    assert trained.loss_mask == [1.0] * 4 + [0.0] * 3
    assert trained.rollout_log_probs == [-0.5] * 4 + [0.0] * 3
    assert len(trained.advantages) == 7


def test_every_sample_goes_to_exactly_one_rank():
    samples = train_samples(arguments(), GROUPS)
    shards = shard_batch(arguments(), samples)
    assert len(shards) == 2
    given = [s for shard in shards for step in shard for micro_batch in step.micro_batches for s in micro_batch]
    assert sorted(map(id, given)) == sorted(map(id, samples))
    assert {(step.num_samples, step.num_tokens) for shard in shards for step in shard} == {(4, 14.0)}
