import logging
import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sleuth.metrics.console import ProgressSafeHandler, evaluation_lines, step_line
from sleuth.metrics.jsonl import read_metrics
from sleuth.metrics.rollout_metrics import evaluation_metrics, rollout_metrics
from sleuth.metrics.tracker import Tracker
from tests.metrics.samples import make_sample


@dataclass(frozen=True)
class TrackerSettings:
    num_rollout: int = 60
    use_tensorboard: bool = False
    use_wandb: bool = False
    wandb_project: str = "sleuth"
    wandb_group: str | None = None
    use_swanlab: bool = False
    swanlab_project: str = "sleuth"
    use_trackio: bool = False
    trackio_project: str = "sleuth"

    def to_dict(self):
        return {"num_rollout": self.num_rollout}


def test_a_step_shows_one_line_and_each_evaluated_set_one(tmp_path, capsys):
    metrics = {"reward/mean": 0.41234, "reward/exact_match": 0.3, "train/loss": 1e-5, "train/grad_norm": 0.812}
    metrics |= {"perf/rollout_tokens_per_second": 1432.4, "time/step": 8.21, "train/ratio_mean": 1.0}
    metrics |= evaluation_metrics([make_sample(components={"exact_match": 1.0}, source="nq")], "demo/greedy")
    with Tracker(TrackerSettings(), tmp_path) as tracker:
        tracker.log(12, metrics)
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "step 12/60  reward 0.412  EM 0.30  loss 1.0e-05  grad 0.81  tok/s 1,432  s 8.2",
        "eval demo/greedy after step 12  EM 1.000  reward 1.000  questions 1",
    ]


def test_no_progress_bar_where_nobody_looks(tmp_path, capsys):
    with Tracker(TrackerSettings(), tmp_path) as tracker:
        for step in range(1, 60):
            tracker.log(step, {"reward/mean": 0.5})
    captured = capsys.readouterr()
    assert captured.err == ""
    assert len(captured.out.splitlines()) == 59


def test_a_bar_in_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Tracker(TrackerSettings(), tmp_path, first_step=21) as tracker:
        tracker.log(21, {"reward/mean": 0.5})
    assert "21/60" in capsys.readouterr().err


def test_nothing_is_shown_of_a_step_without_the_numbers_of_a_line():
    assert step_line(0, 60, {"eval/a/em": 1.0}) == ""
    assert evaluation_lines(0, {"loss": 1.0}) == []


def test_evaluation_lines_leave_sources_out():
    metrics = evaluation_metrics([make_sample(source="nq")], "demo/t1.0")
    assert evaluation_lines(0, metrics) == ["eval demo/t1.0 before training  reward 1.000  questions 1"]


def test_metrics_that_are_not_finite_are_named_in_a_warning(tmp_path, caplog):
    with Tracker(TrackerSettings(use_tensorboard=True), tmp_path) as tracker:
        tracker.log(1, {"train/loss": float("nan"), "train/lr": 1.0})
    assert "step 1: not a finite number: train/loss" in caplog.text
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["train/loss"] is None


def tensorboard_scalars(folder, name):
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_tensorboard_gets_every_metric_and_a_resumed_run_replaces_its_steps(tmp_path):
    settings = TrackerSettings(use_tensorboard=True)
    with Tracker(settings, tmp_path) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, rollout_metrics([make_sample(reward=0.0)]))
    with Tracker(settings, tmp_path, first_step=2) as tracker:
        tracker.log(2, rollout_metrics([make_sample(reward=1.0)]))
    assert tensorboard_scalars(tmp_path / "tensorboard", "reward/mean") == [(1, 0.0), (2, 1.0)]
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_tracker_that_cannot_start_is_told_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with Tracker(TrackerSettings(use_wandb=True, use_tensorboard=True), tmp_path) as tracker:
        tracker.log(1, {"train/loss": 0.5})
    assert caplog.text.count("wandb gets no more metrics: ModuleNotFoundError") == 1
    assert tensorboard_scalars(tmp_path / "tensorboard", "train/loss") == [(1, 0.5)]
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["train/loss"] == 0.5


def test_a_full_disk_is_told_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    with Tracker(TrackerSettings(), tmp_path) as tracker:
        monkeypatch.setattr(tracker._file, "write", full)
        tracker.log(1, {"train/loss": 0.5})
    assert "the metrics of step 1 are not in metrics.jsonl: [Errno 28]" in caplog.text


@pytest.mark.parametrize(
    ("given", "used"), [({"WANDB_KEY": "k"}, "k"), ({"WANDB_KEY": "k", "WANDB_API_KEY": "a"}, "a")]
)
def test_wandb_takes_its_key_from_either_variable(tmp_path, monkeypatch, given, used):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("WANDB_KEY", "WANDB_API_KEY"):
        os.environ.pop(name, None)
    os.environ.update(given)
    seen = []

    def init(**_):
        seen.append(os.environ["WANDB_API_KEY"])
        return SimpleNamespace(id="x", log=print, define_metric=lambda *_, **__: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    Tracker(TrackerSettings(use_wandb=True), tmp_path).close()
    assert seen == [used]


def test_a_resumed_run_continues_its_wandb_run(tmp_path, monkeypatch):
    calls = []

    class Run:
        id = "abc"

        def log(self, values):
            calls.append(values)

        def define_metric(self, name, step_metric):
            calls.append((name, step_metric))

        def finish(self):
            calls.append("finish")

    def init(**options):
        calls.append(options)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    settings = TrackerSettings(use_wandb=True, wandb_group="g")
    with Tracker(settings, tmp_path) as tracker:
        tracker.log(1, {"loss": 0.5})
    with Tracker(settings, tmp_path, first_step=2):
        pass
    first, second = [call for call in calls if isinstance(call, dict) and "project" in call]
    assert (first["project"], first["group"], first["id"], first["config"]) == (
        "sleuth",
        "g",
        None,
        {"num_rollout": 60},
    )
    assert (second["id"], second["resume"]) == ("abc", "allow")
    assert {"step": 1, "loss": 0.5} in calls
    assert calls.count("finish") == 2


def test_a_new_run_in_an_old_folder_keeps_nothing_of_the_old_one(tmp_path):
    with Tracker(TrackerSettings(), tmp_path) as tracker:
        tracker.log(0, {"eval/demo/greedy/em": 0.5})
        tracker.log(1, {"train/loss": 0.5})
    with Tracker(TrackerSettings(), tmp_path) as tracker:
        tracker.log(1, {"train/loss": 0.25})
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_log_lines_go_above_the_bar(capsys):
    record = logging.LogRecord("sleuth", logging.WARNING, __file__, 1, "hello %s", ("you",), None)
    ProgressSafeHandler().handle(record)
    assert capsys.readouterr().err == "hello you\n"
