import pytest

from sleuth.metrics.rollout_metrics import evaluation_metrics, evaluation_name, overlong_wait, rollout_metrics
from sleuth.sample import SampleStatus, StopReason
from tests.metrics.samples import make_sample


def test_rewards_and_components_are_averaged_over_samples_that_have_them():
    samples = [
        make_sample(reward=1.0, components={"exact_match": 1.0, "valid_format": 1.0}),
        make_sample(reward=0.0, components={"exact_match": 0.0}),
        make_sample(reward=None, status=SampleStatus.FAILED, reason=StopReason.SEARCH_FAILED),
    ]
    metrics = rollout_metrics(samples)
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/std"] == 0.5
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 1.0)
    assert metrics["reward/exact_match"] == 0.5
    assert metrics["reward/valid_format"] == 1.0
    assert "reward/retrieval_hit" not in metrics


def test_lengths_count_model_and_observation_tokens_apart():
    metrics = rollout_metrics([make_sample(), make_sample()])
    assert metrics["rollout/response_length/mean"] == metrics["rollout/response_length/max"] == 8
    assert metrics["rollout/model_tokens"] == 12
    assert metrics["rollout/observation_tokens"] == 4
    assert metrics["rollout/prompt_length/mean"] == 3
    assert metrics["rollout/tokens"] == 22


def test_every_status_and_stop_reason_is_reported_even_when_it_did_not_occur():
    samples = [make_sample(), make_sample(status=SampleStatus.TRUNCATED, reason=StopReason.TURN_LIMIT)]
    metrics = rollout_metrics(samples)
    assert metrics["rollout/truncated"] == 0.5
    assert metrics["rollout/status/completed"] == 1
    assert metrics["rollout/status/failed"] == 0
    assert {reason: metrics[f"rollout/stop/{reason}"] for reason in StopReason} == {
        reason: 0.5 if reason in ("answered", "turn_limit") else 0.0 for reason in StopReason
    }


def test_replaced_samples_count_only_in_how_trajectories_ended():
    failed = [make_sample(reward=None, status=SampleStatus.FAILED, reason=StopReason.SEARCH_FAILED)]
    metrics = rollout_metrics([make_sample(), make_sample(), make_sample()], failed)
    assert (metrics["rollout/samples"], metrics["rollout/failed_samples"]) == (3, 1)
    assert (metrics["rollout/status/failed"], metrics["rollout/stop/search_failed"]) == (1, 0.25)
    assert metrics["rollout/truncated"] == 0


def test_groups_of_equal_rewards_are_counted():
    samples = [make_sample(group=0, reward=1.0), make_sample(group=0, reward=1.0)]
    samples += [make_sample(group=1, reward=1.0), make_sample(group=1, reward=0.0), make_sample(group=2)]
    metrics = rollout_metrics(samples)
    assert metrics["rollout/groups"] == 3
    assert metrics["rollout/zero_variance_groups"] == 1
    assert metrics["rollout/degenerate_group_rate"] == pytest.approx(1 / 3)


def test_groups_that_are_all_right_or_all_wrong_are_counted_where_the_reward_says_so():
    right, wrong = {"exact_match": 1.0}, {"exact_match": 0.0}
    samples = [make_sample(group=group, components=right) for group in (0, 0, 1, 1, 2)]
    samples += [make_sample(group=2, components=wrong), make_sample(group=3, components=wrong, reward=0.2)]
    metrics = rollout_metrics(samples)
    assert (metrics["rollout/groups_all_right"], metrics["rollout/groups_all_wrong"]) == (2, 1)
    assert "rollout/groups_all_right" not in rollout_metrics([make_sample()])


def test_numbers_of_the_generate_hook_and_weight_versions():
    samples = [
        make_sample(reported={"searches": 2.0}, version="7"),
        make_sample(reported={"searches": 1.0}, version="8"),
    ]
    metrics = rollout_metrics([*samples, make_sample(version="default")])
    assert metrics["rollout/searches"] == 1.5
    assert (metrics["rollout/weight_version/min"], metrics["rollout/weight_version/max"]) == (7, 8)
    assert "rollout/weight_version/min" not in rollout_metrics([make_sample(version=None)])


def test_no_samples():
    assert rollout_metrics([]) == {"rollout/samples": 0.0}


def test_evaluation_is_reported_overall_by_source_and_macro():
    right = {"exact_match": 1.0, "valid_format": 1.0}
    wrong = {"exact_match": 0.0, "valid_format": 1.0}
    samples = [
        make_sample(components=right, reported={"searches": 1.0}, source="nq"),
        make_sample(components=right, reported={"searches": 1.0}, source="nq"),
        make_sample(components=right, reported={"searches": 1.0}, source="nq"),
        make_sample(components=wrong, reported={"searches": 3.0}, source="hot/pot", reward=0.2),
    ]
    metrics = evaluation_metrics(samples, "test/greedy")
    assert metrics["eval/test/greedy/em"] == 0.75
    assert metrics["eval/test/greedy/format"] == 1.0
    assert metrics["eval/test/greedy/searches"] == 1.5
    assert metrics["eval/test/greedy/reward"] == pytest.approx(0.8)
    assert metrics["eval/test/greedy/questions"] == 4
    assert metrics["eval/test/greedy/source/nq/em"] == 1.0
    assert metrics["eval/test/greedy/source/hot-pot/em"] == 0.0
    assert metrics["eval/test/greedy/macro/em"] == 0.5


def test_components_of_a_users_own_reward_are_reported_under_their_names():
    samples = [make_sample(components={"style": style, "exact_match": 1.0}, source="a") for style in (0.0, 1.0)]
    metrics = evaluation_metrics(samples, "test/greedy")
    assert metrics["eval/test/greedy/style"] == metrics["eval/test/greedy/macro/style"] == 0.5
    assert metrics["eval/test/greedy/em"] == 1.0
    assert "eval/test/greedy/exact_match" not in metrics


def test_evaluation_counts_the_trajectories_that_failed_apart():
    failed = make_sample(reward=None, status=SampleStatus.FAILED, reason=StopReason.SEARCH_FAILED)
    metrics = evaluation_metrics([make_sample(components={"exact_match": 1.0})], "test", [failed, failed])
    assert metrics["eval/test/em"] == 1.0
    assert (metrics["eval/test/questions"], metrics["eval/test/failed"]) == (1, 2)


def test_evaluation_of_nothing_claims_nothing():
    assert evaluation_metrics([], "test") == {"eval/test/questions": 0.0, "eval/test/failed": 0.0}


def test_how_long_a_trajectory_takes_is_reported_and_the_slowest_told():
    times = [1.0, 2.0, 3.0, 200.0]
    samples = [make_sample(reported={"trajectory_seconds": seconds}) for seconds in times]
    samples[3].report(search_seconds=190.0, generation_seconds=9.0)
    samples[3].file, samples[3].row = "test.parquet", 17
    metrics = evaluation_metrics(samples, "test")
    assert (metrics["eval/test/seconds"], metrics["eval/test/seconds_max"]) == (51.5, 200.0)
    assert overlong_wait(samples) == (
        "the slowest of 4 trajectories, row 17 of test.parquet, took 200.0 s, of which it waited 190.0 s for searches "
        "and 9.0 s for the engine; the median took 2.5 s"
    )


@pytest.mark.parametrize("times", [[], [1.0, 2.0, 29.0], [100.0, 200.0, 300.0]])
def test_a_wait_like_the_others_is_not_told(times):
    assert overlong_wait([make_sample(reported={"trajectory_seconds": seconds}) for seconds in times]) is None


@pytest.mark.parametrize(
    ("temperature", "name"), [(0, "nq/greedy"), (0.0, "nq/greedy"), (1, "nq/t1.0"), (0.25, "nq/t0.25")]
)
def test_names_of_evaluations(temperature, name):
    assert evaluation_name("nq", temperature) == name
