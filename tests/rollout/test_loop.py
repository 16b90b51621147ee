"""The generation loop with scripted hooks: order, replacement, limits, and what an error looks like."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from sleuth.rollout import single_turn
from sleuth.rollout.context import Generation, RolloutContext, use_rollout_context
from sleuth.rollout.loop import GenerationLoop, Hooks, RolloutError
from sleuth.sample import SampleStatus, StopReason


@dataclass
class Row:
    prompt: str
    label: Any = None
    metadata: dict = field(default_factory=dict)
    file: str = "train.parquet"
    index: int = 0

    @property
    def prompt_ids(self):
        return [ord(c) for c in self.prompt]


def arguments(**changes):
    values = {
        "rollout_batch_size": 3,
        "n_samples_per_prompt": 2,
        "n_samples_per_eval_prompt": 1,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": 8,
        "rollout_max_context_len": 100,
        "rollout_stop": ["</x>"],
        "eval_top_p": 1.0,
        "eval_max_response_len": None,
        "max_failure_rate": 0.5,
    }
    return SimpleNamespace(**(values | changes))


class Rows:
    def __init__(self):
        self.given = 0

    def __call__(self, n):
        rows = [Row(f"p{i}", index=i) for i in range(self.given, self.given + n)]
        self.given += n
        return rows


async def answer(args, sample, sampling_params):
    await asyncio.sleep(0.001 * (5 - sample.group_index))  # later groups finish first
    sample.trace.append_model([1, 2], [-0.5, -0.25])
    return sample.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)


async def one(args, sample, **kwargs):
    return 1.0


def run(generate=answer, reward=one, keep=None, rows=None, **changes):
    loop = GenerationLoop(arguments(**changes), Hooks(generate, reward, keep))
    return asyncio.run(loop.rollout(rows or Rows()))


def test_groups_come_in_the_order_of_the_data():
    rollout = run()
    assert [[s.prompt for s in g] for g in rollout.groups] == [["p0"] * 2, ["p1"] * 2, ["p2"] * 2]
    assert [s.index for s in rollout.samples] == list(range(6))
    assert [(s.file, s.row) for s in rollout.samples[::2]] == [("train.parquet", row) for row in (0, 1, 2)]
    assert all(s.reward == 1.0 for s in rollout.samples)


def test_a_failed_trajectory_starts_over_from_its_prompt():
    tries = {}

    async def flaky(args, sample, sampling_params):
        tries[sample.index] = tries.get(sample.index, 0) + 1
        if tries[sample.index] == 1 and sample.index in (1, 4):
            sample.trace.append_model([9], [-1.0])
            return sample.finish(SampleStatus.FAILED, StopReason.SEARCH_FAILED, "no route to the server")
        return await answer(args, sample, sampling_params)

    rollout = run(flaky)
    assert [sample.stop_reason for sample in rollout.failed] == [StopReason.SEARCH_FAILED] * 2
    assert all(s.trace.response_ids == [1, 2] and s.error is None for s in rollout.samples)


def test_too_many_failures_stop_the_step_and_say_why():
    async def down(args, sample, sampling_params):
        return sample.finish(SampleStatus.FAILED, StopReason.SEARCH_FAILED, "connection refused by 127.0.0.1:1")

    with pytest.raises(RolloutError, match=r"--max-failure-rate allows 3.*connection refused by 127.0.0.1:1"):
        run(down)


def test_a_filtered_group_is_replaced_by_the_next_prompt():
    rows = Rows()
    rollout = run(keep=lambda args, group: group[0].prompt not in ("p0", "p3"), rows=rows)
    assert [g[0].prompt for g in rollout.groups] == ["p1", "p2", "p4"]
    assert rollout.filtered_groups == 2
    assert rows.given == 5


def test_a_filter_that_rejects_everything_stops_the_step():
    with pytest.raises(RolloutError, match="kept 0 of 3"):
        run(keep=lambda args, group: False)


def test_a_bug_in_a_hook_comes_out_as_itself():
    async def buggy(args, sample, sampling_params):
        await asyncio.sleep(0.001)
        raise KeyError("titel")

    with pytest.raises(KeyError, match="titel"):
        run(buggy)


def test_reward_components_need_a_total():
    async def parts(args, sample, **kwargs):
        return {"reward": 0.8, "exact_match": 1.0}

    sample = run(reward=parts).samples[0]
    assert (sample.reward, sample.reward_components) == (0.8, {"exact_match": 1.0})

    async def no_total(args, sample, **kwargs):
        return {"exact_match": 1.0}

    with pytest.raises(ValueError, match="total as 'reward'"):
        run(reward=no_total)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_an_error(value):
    async def broken(args, sample, **kwargs):
        return value

    with pytest.raises(ValueError, match="finite"):
        run(reward=broken)


def test_a_pending_sample_is_an_error():
    async def forgetful(args, sample, sampling_params):
        return sample

    with pytest.raises(ValueError, match="PENDING"):
        run(forgetful)


def test_evaluation_is_announced_and_uses_its_own_parameters():
    seen = []

    async def generate(args, sample, sampling_params, evaluation=False):
        seen.append((evaluation, sampling_params["temperature"], sampling_params["max_new_tokens"]))
        return await answer(args, sample, sampling_params)

    loop = GenerationLoop(arguments(eval_max_response_len=5), Hooks(generate, one))
    rollout = asyncio.run(loop.evaluate([Row("a"), Row("b")], temperature=0.0))
    assert [s.prompt for s in rollout.samples] == ["a", "b"]
    assert seen == [(True, 0.0, 5)] * 2
    assert rollout.failed == []


def test_evaluation_tells_which_trajectories_failed_before_they_were_repeated():
    tries = []

    async def flaky(args, sample, sampling_params):
        tries.append(sample.prompt)
        if tries.count("b") == 1 and sample.prompt == "b":
            return sample.finish(SampleStatus.FAILED, StopReason.SEARCH_FAILED, "no route to the server")
        return await answer(args, sample, sampling_params)

    loop = GenerationLoop(arguments(), Hooks(flaky, one))
    rollout = asyncio.run(loop.evaluate([Row("a"), Row("b")], temperature=0.0))
    assert [(s.prompt, s.stop_reason) for s in rollout.failed] == [("b", StopReason.SEARCH_FAILED)]
    assert [(s.prompt, s.status) for s in rollout.samples] == [("a", "completed"), ("b", "completed")]


@pytest.mark.parametrize(
    ("reason", "context", "status", "stop"),
    [
        ("stop", 100, SampleStatus.COMPLETED, StopReason.ENDED),
        ("length", 100, SampleStatus.TRUNCATED, StopReason.RESPONSE_LIMIT),
        ("length", 4, SampleStatus.TRUNCATED, StopReason.CONTEXT_LIMIT),
    ],
)
def test_without_a_generate_hook_the_model_speaks_once(reason, context, status, stop):
    class Engine:
        async def generate(self, input_ids, sampling_params):
            assert sampling_params["max_new_tokens"] == min(8, context - 2)
            assert list(input_ids) == Row("p0").prompt_ids
            return Generation([5, 6], [-0.1, -0.2], "ab", reason, "7")

    with use_rollout_context(RolloutContext(Engine(), None)):
        rollout = run(single_turn.generate, rollout_batch_size=1, rollout_max_context_len=context)
    for sample in rollout.samples:
        assert (sample.status, sample.stop_reason) == (status, stop)
        assert (sample.trace.response_ids, sample.trace.loss_mask) == ([5, 6], [1, 1])
        assert sample.weight_version == "7"
