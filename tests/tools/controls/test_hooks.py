"""What the controls' hooks change, and that they change nothing else."""

import asyncio
from types import SimpleNamespace

import pytest

from generate_with_search import generate, reward_func
from sleuth.arguments import Args
from sleuth.hooks.testing import converse
from sleuth.rollout.train_batches import train_samples
from sleuth.sample import Sample, TokenTrace
from tests.scripted import make_plain_bpe_tokenizer
from tools.controls import hooks

SEARCH = "<think>a</think><search>capital of France</search>"
WRONG, RIGHT = (f"<think>b</think><answer>{place}</answer>" for place in ("Lyon", "Paris"))
LABEL = {"ground_truth": {"target": ["Paris"]}}


@pytest.fixture(scope="module")
def tokenizer():
    return make_plain_bpe_tokenizer()


def talk(tokenizer, turns, reward, **search_r1):
    search_r1 = {"search_backend": "tools.controls.hooks.unrelated_search", "topk": 1, **search_r1}
    args = SimpleNamespace(custom_config={"search_r1": search_r1}, rollout_max_context_len=4000)
    return converse(generate, turns, tokenizer=tokenizer, label=LABEL, reward=reward, args=args)[0]


@pytest.mark.parametrize(
    ("turns", "reward", "right"), [([WRONG], 1.0, 0.0), ([RIGHT], 1.0, 1.0), (["Paris"] * 3, 0.0, 0.0)]
)
def test_reward_for_format_alone(tokenizer, turns, reward, right):
    sample = talk(tokenizer, turns, hooks.format_reward)
    assert sample.reward == reward
    assert sample.reward_components["exact_match"] == right


def test_without_the_mask_every_response_token_is_trained_on_and_the_reward_is_the_demos(tokenizer):
    plain, unmasked = (talk(tokenizer, [SEARCH, RIGHT], hook) for hook in (reward_func, hooks.unmasked_reward))
    assert 0 in plain.trace.loss_mask
    assert unmasked.trace.loss_mask == [1] * len(plain.trace.loss_mask)
    assert unmasked.trace.response_ids == plain.trace.response_ids
    assert (unmasked.reward, unmasked.reward_components) == (plain.reward, plain.reward_components)
    assert unmasked.reward == 1.0


def group(rewards, first=0):
    samples = [Sample(prompt="", index=first + i, group_index=0, trace=TokenTrace([1])) for i in range(len(rewards))]
    for i, (sample, reward) in enumerate(zip(samples, rewards, strict=True)):
        sample.trace.append_model([2, first + i], [-1.0, -1.0])
        sample.reward = reward
    return samples


def test_shuffled_rewards_keep_the_groups_rewards_and_lose_their_owners():
    args = SimpleNamespace(seed=1)
    rewards = [1.0, 0.2, 0.2, 0.0, 1.0, 0.2, 0.8, 0.0]
    kept_places = 0
    for number in range(200):
        samples = group(rewards, first=10 * number)
        assert hooks.shuffled_rewards(args, samples) is True
        assert sorted(sample.reward for sample in samples) == sorted(rewards)
        kept_places += sum(sample.reward == reward for sample, reward in zip(samples, rewards, strict=True))
    # By chance (2*2 + 3*3 + 2*2 + 1)/8 = 2.25 of 8 stay in place; the standard error over 200 groups is below 0.12.
    assert kept_places / 200 == pytest.approx(2.25, abs=0.5)


def test_shuffled_rewards_reach_the_advantages():
    args = Args.model_construct(advantage_estimator="grpo", kl_coef=0.0, disable_grpo_std_normalization=False, seed=1)
    samples = group([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    for first in range(9):
        hooks.shuffled_rewards(args, samples)
        assert [s.advantages[0] > 0 for s in train_samples(args, [samples])] == [s.reward == 1.0 for s in samples], (
            first
        )


def test_unrelated_passages_are_the_same_for_a_query_and_differ_between_queries():
    first, again, other = (asyncio.run(hooks.unrelated_search(query, 2)) for query in ("Ada", "Ada", "Karl"))
    assert first == again
    assert len(first) == 2
    assert not set(first) & set(other)


def test_with_search_off_the_first_search_ends_the_trajectory(tokenizer):
    import yaml

    changes = yaml.safe_load((hooks.CORPUS.parents[2] / "tools/controls/search_off.yaml").read_text())
    sample = talk(tokenizer, [SEARCH], reward_func, **changes["search_r1"])
    assert (sample.stop_reason, sample.reward) == ("turn_limit", 0.0)
    assert sample.rollout_metrics["searches"] == 0
    assert talk(tokenizer, [RIGHT], reward_func, **changes["search_r1"]).reward == 1.0
