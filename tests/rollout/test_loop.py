"""The generation loop with scripted hooks: order, replacement, limits, and what an error looks like."""

import asyncio
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from sleuth.hooks import FailSample, Generation, RolloutContext, StopRunError, single_turn, use_rollout_context
from sleuth.metrics.rollout_metrics import rollout_metrics
from sleuth.rollout.hook_runner import Hooks
from sleuth.rollout.loop import GenerationLoop, RolloutError
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
        "hook_timeout": 60.0,
        "dynamic_sampling_filter_path": "my.filter",
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


async def finish(args, sample, sampling_params):
    return sample.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)


async def raise_key_error(args, sample, *rest):
    await asyncio.sleep(0.001)
    raise KeyError("titel")


async def return_list(args, sample, sampling_params):
    return [sample]


async def forget_to_return(args, sample, sampling_params):
    sample.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)


async def forget_to_finish(args, sample, sampling_params):
    return sample


async def finish_twice(args, sample, sampling_params):
    sample.finish(SampleStatus.TRUNCATED, StopReason.CONTEXT_LIMIT)
    return sample.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)


async def forget_log_probs(args, sample, sampling_params):
    sample.trace.response_ids.extend([1, 2])
    return await finish(args, sample, sampling_params)


async def make_up_ids(args, sample, sampling_params):
    sample.trace.append_model([1, 99], [-1.0, -1.0])
    return await finish(args, sample, sampling_params)


async def talk_too_long(args, sample, sampling_params):
    sample.trace.append_observation([1] * 99)
    return await finish(args, sample, sampling_params)


async def leave(args, sample, sampling_params):
    raise SystemExit(3)


async def forget_a_reason(args, sample, sampling_params):
    sample.status = SampleStatus.COMPLETED
    return sample


async def fail_in_a_group(args, sample, sampling_params):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(raise_key_error(args, sample))


async def wait_for_a_cancelled_task(args, sample, sampling_params):
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task


class SilentError(Exception):
    def __str__(self):
        raise AttributeError("no request")


class NoException(BaseException):
    pass


def raising(error):
    async def generate(args, sample, sampling_params):
        raise error

    return generate


def setting(**changes):
    async def generate(args, sample, sampling_params):
        await finish(args, sample, sampling_params)
        for name, value in changes.items():
            setattr(sample, name, value)
        return sample

    return generate


async def make_up_fractions(args, sample, sampling_params):
    sample.trace.response_ids.append(1.5)
    sample.trace.loss_mask.append(0)
    sample.trace.log_probs.append(0.0)
    return await finish(args, sample, sampling_params)


@pytest.mark.parametrize(
    ("generate", "message"),
    [
        (raising(SilentError()), r"SilentError: its text cannot be made \(test_loop.py:\d+\)"),
        (raising(NoException("gone")), "NoException: gone"),
        (raising(ValueError("a\nb" + "c" * 10**6)), r"ValueError: a bc{900,1000}\.\.\. \(\d+ characters\) \("),
        (setting(status="completed"), "expected a SampleStatus as status, found 'completed'"),
        (setting(stop_reason="My reason"), "found 'My reason'"),
        (setting(metadata=None), "expected the metadata of the row, found None"),
        (
            setting(rollout_metrics={"score": "high"}),
            "expected numbers in rollout_metrics, found 'high' .str. as score",
        ),
        (make_up_fractions, r"expected whole numbers as ids, found 1.5"),
        (raise_key_error, r"generate hook \S*raise_key_error: KeyError: 'titel' \(test_loop.py:\d+\)"),
        (return_list, "expected the finished Sample, found list"),
        (forget_to_return, "expected the finished Sample, found NoneType; end with `return sample`"),
        (forget_to_finish, "still PENDING"),
        (finish_twice, "finished already"),
        (forget_log_probs, "one log-probability for each of 2 response ids"),
        (make_up_ids, r"expected ids in \[0, 50\).*found 99"),
        (talk_too_long, r"hook \S*talk_too_long: .*at most 100 tokens \(--rollout-max-context-len\), found 101 \(2 of"),
        (leave, "SystemExit: 3"),
        (forget_a_reason, "found one without a reason"),
        (fail_in_a_group, r"KeyError: 'titel' \(test_loop.py:\d+\)"),
        (wait_for_a_cancelled_task, r"CancelledError \(test_loop.py:\d+\)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_generate_hook_that_fails_is_named_with_its_sample(generate, message):
    with (
        use_rollout_context(RolloutContext(None, None, vocab_size=50)),
        pytest.raises(RolloutError, match=rf"sample \d+ \(row \d.*\): hook_error: .*{message}.*Mend the hook"),
    ):
        run(generate)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (StopRunError("the engine is gone"), StopRunError, "the engine is gone"),
        (FailSample("judge_busy", "503"), RolloutError, "judge_busy: generate hook .*503"),
    ],
)
def test_an_error_in_a_group_of_tasks_is_told_as_itself(error, kind, message):
    async def generate(args, sample, sampling_params):
        async def fail():
            raise error

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(raise_key_error(args, sample))
            tasks.create_task(fail())

    with pytest.raises(kind, match=message):
        run(generate)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "expected a finite number or a dictionary of finite numbers, found None"),
        ("0.5", "found '0.5'"),
        (float("nan"), "found nan"),
        (float("inf"), "found inf"),
        ({"reward": 1.0, "style": "good"}, "found 'good' .str. as style"),
        ({"exact_match": 1.0}, "expected the total as 'reward'"),
    ],
)
def test_a_reward_that_is_none_is_named_with_its_sample(result, message):
    async def reward(args, sample, **kwargs):
        return result

    with pytest.raises(RolloutError, match=rf"reward_error: reward hook .*reward: ValueError: .*{message}"):
        run(reward=reward)


def test_a_reward_hook_that_spoils_the_sample_is_named():
    async def reward(args, sample, **kwargs):
        sample.metadata = None
        return 1.0

    with pytest.raises(RolloutError, match=r"reward_error: .*expected the metadata of the row, found None"):
        run(reward=reward)


def test_reward_components_are_kept_beside_the_total():
    async def parts(args, sample, **kwargs):
        return {"reward": 0.8, "exact_match": 1.0}

    sample = run(reward=parts).samples[0]
    assert (sample.reward, sample.reward_components) == (0.8, {"exact_match": 1.0})


def test_a_reward_beyond_measure_is_told_once(caplog):
    async def large(args, sample, **kwargs):
        return 1e300

    run(reward=large)
    (record,) = [record for record in caplog.records if "reward hook" in record.getMessage()]
    assert re.search(r"large gave 1e\+300 for sample \d+ \(row \d", record.getMessage())
    caplog.clear()
    run(reward=one)
    assert not caplog.records


def test_a_sample_of_exactly_the_limit_is_trained_on():
    rollout = run(answer, rollout_max_context_len=4)
    assert {len(sample.trace) for sample in rollout.samples} == {4}


def test_the_text_of_a_failure_is_bounded_however_the_hook_gives_it(caplog):
    async def generate(args, sample, sampling_params):
        if sample.index == 0 and not failed:
            failed.append(sample.finish(SampleStatus.FAILED, "page_broken", "<html>" * 10**6))
            sample.error = "<html>" * 10**6
            return sample
        return await answer(args, sample, sampling_params)

    failed = []
    rollout = run(generate)
    assert len(rollout.failed[0].error) < 2100
    assert rollout.failed[0].error.endswith("... (6000000 characters)")
    assert max(len(record.getMessage()) for record in caplog.records) < 2300


def test_a_hook_that_fails_now_and_then_costs_its_own_samples_only():
    calls = []

    async def judge(args, sample, **kwargs):
        calls.append(sample.index)
        if len(calls) % 6 == 0:
            raise FailSample("judge_busy", "the judge answered 500")
        return 1.0

    rollout = run(reward=judge)
    assert [(s.status, s.stop_reason) for s in rollout.failed] == [(SampleStatus.FAILED, "judge_busy")]
    assert len(rollout.samples) == 6
    assert rollout_metrics(rollout.samples, rollout.failed)["rollout/stop/judge_busy"] == pytest.approx(1 / 7)


def test_a_hook_can_stop_the_run():
    async def down(args, sample, sampling_params):
        raise StopRunError("the licence server is down")

    with pytest.raises(StopRunError, match="licence"):
        run(down)


def test_an_error_that_cannot_be_pickled_reaches_the_driver_as_text():
    class LicenceError(StopRunError):
        def __init__(self, host, *, port):
            super().__init__(f"{host}:{port} is down")
            self.lock = asyncio.Lock()

    async def down(args, sample, sampling_params):
        raise LicenceError("here", port=1)

    with pytest.raises(RolloutError, match="LicenceError: here:1 is down"):
        run(down)


@pytest.mark.parametrize("which", ["generate", "reward"])
def test_a_hook_that_hangs_is_ended(which):
    async def hang(args, sample, *rest, **kwargs):
        await asyncio.sleep(60)

    with pytest.raises(
        RolloutError, match=rf"hook_timeout: {which} hook .*hang: no result within --hook-timeout 0.05 s"
    ):
        run(**{which: hang}, hook_timeout=0.05)


def test_a_filter_that_fails_is_named():
    with pytest.raises(RolloutError, match=r"my.filter failed on prompt 0.*ZeroDivisionError"):
        run(keep=lambda args, group: 1 / 0)


def test_a_trace_filled_by_hand_gets_its_segments():
    async def by_hand(args, sample, sampling_params):
        trace = sample.trace
        trace.response_ids.extend([1, 2, 3])
        trace.loss_mask.extend([1, 0, 1])
        trace.log_probs.extend([-0.5, 0.0, -0.25])
        return await finish(args, sample, sampling_params)

    segments = run(by_hand).samples[0].trace.segments
    assert [(s.source, s.start, s.end) for s in segments] == [("model", 0, 1), ("observation", 1, 2), ("model", 2, 3)]


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


def test_evaluation_bounds_what_is_under_way_and_takes_what_is_finished():
    under_way, most = 0, 0

    async def generate(args, sample, sampling_params):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        return await answer(args, sample, sampling_params)

    class Kept:
        def __init__(self):
            self.recorded = []

        def take(self, new):
            return new.finish(SampleStatus.COMPLETED, StopReason.ENDED) if new.prompt == "b" else None

        async def record(self, sample, entry=None):
            self.recorded.append(sample.prompt)

    kept = Kept()
    loop = GenerationLoop(arguments(), Hooks(generate, one))
    rollout = asyncio.run(loop.evaluate([Row(name) for name in "abcdef"], 0.0, journal=kept, at_once=2))
    assert most == 2
    assert sorted(kept.recorded) == ["a", "c", "d", "e", "f"]
    assert [sample.stop_reason for sample in rollout.samples[:2]] == [StopReason.ANSWERED, StopReason.ENDED]
    assert rollout.samples[0].rollout_metrics["trajectory_seconds"] >= 0.001
    assert "trajectory_seconds" not in rollout.samples[1].rollout_metrics


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
