"""The numbers of an evaluation equal those that a run logs."""

from __future__ import annotations

import pytest
from rich.console import Console
from rich.table import Table

from sleuth.metrics.rollout_metrics import evaluation_metrics
from sleuth.sample import Sample, SampleStatus, StopReason
from tests.metrics.samples import make_sample
from tools.evaluation.summary import print_whole, summarize, table


def answers(source: str, right: list[list[int]], first: int = 0) -> list[Sample]:
    """Samples of questions, `right[question][sample]`."""
    return [
        make_sample(
            index=0,
            group=first + question,
            source=source,
            reward=float(em),
            components={"exact_match": float(em), "valid_format": 1.0, "style": 0.5},
            reported={"searches": 2.0, "search_seconds": 0.5, "trajectory_seconds": 3.0},
        )
        for question, samples in enumerate(right)
        for em in samples
    ]


def test_the_values_are_those_of_a_run() -> None:
    samples = answers("nq", [[1], [0], [1]]) + answers("hot/pot", [[0]], first=3)
    summary = summarize(samples)
    metrics = evaluation_metrics(samples, "x")
    assert list(summary) == ["hot-pot", "nq", "all", "macro"]
    for name, path in {"nq": "source/nq/", "hot-pot": "source/hot-pot/", "all": "", "macro": "macro/"}.items():
        for measure in ("em", "format", "reward", "searches", "style", "seconds", "response_length"):
            assert summary[name]["measures"][measure]["value"] == metrics[f"eval/x/{path}{measure}"]
    em = summary["all"]["measures"]["em"]
    assert 0.0 <= em["low"] < em["value"] < em["high"] <= 1.0
    assert summary["nq"]["measures"]["search_latency"]["value"] == 0.25
    assert [summary[name]["questions"] for name in summary] == [1, 3, 4, 4]
    assert "pass@2" not in summary["all"]["measures"]


def test_several_samples_of_a_question_have_a_mean_and_pass_at_k() -> None:
    measures = summarize(answers("nq", [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]))["all"]["measures"]
    assert measures["em"]["value"] == pytest.approx(5 / 12)
    assert measures["pass@2"]["value"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert measures["pass@4"]["value"] == pytest.approx(2 / 3)
    assert set(measures) >= {"pass@2", "pass@4"}
    assert "pass@8" not in measures


def test_searches_that_failed_count_where_they_failed() -> None:
    failed = make_sample(group=0, source="nq", status=SampleStatus.FAILED, reason=StopReason.SEARCH_FAILED)
    broken = make_sample(group=0, source="nq", status=SampleStatus.FAILED, reason=StopReason.HOOK_ERROR)
    summary = summarize(answers("nq", [[1], [0]]) + answers("pop", [[1]], first=2), [failed, broken])
    success = {name: summary[name]["measures"]["search_success"]["value"] for name in summary}
    assert success == {"nq": 0.8, "pop": 1.0, "all": pytest.approx(6 / 7), "macro": 0.9}


def test_a_hook_without_searches_and_exact_match_has_its_own_measures() -> None:
    summary = summarize([make_sample(group=group, components={"style": 1.0}) for group in range(2)])
    assert summary["unknown"]["measures"].keys() == {"style", "reward", "response_length", "truncated"}


def test_the_table_shows_values_and_intervals() -> None:
    console = Console(width=200, record=True)
    console.print(table("demo", summarize(answers("nq", [[1], [0]]) + answers("pop", [[1]], first=2))))
    text = console.export_text()
    assert all(word in text for word in ("nq", "pop", "all", "macro", "EM", "s/search", "0.667", "[0.000, 1.000]"))
    one = Console(width=200, record=True)
    one.print(table("demo", summarize(answers("nq", [[1], [0]]))))
    assert "macro" not in one.export_text()


def test_a_table_that_is_wider_than_a_pipe_is_printed_whole(capsys):
    wide = Table(*(f"column {i}" for i in range(20)))
    wide.add_row(*["(0.123, 0.456)"] * 20)
    print_whole(Console(width=80), wide)
    assert capsys.readouterr().out.count("(0.123, 0.456)") == 20
