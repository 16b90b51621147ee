import json

import matplotlib.pyplot as plt
import pytest
from matplotlib import image

from tools.plots import (
    EVALUATION_PANELS,
    PANELS,
    Panel,
    _dress,
    panel_series,
    plot_run,
    plot_runs,
    shared_mean,
)


def write_run(folder, offset=0.0, steps=6):
    folder.mkdir()
    lines = [{"step": 0, "eval/demo/t1.0/em": 0.1 + offset, "eval/demo/t1.0/source/x/t1.0/em": 9.0}]
    for step in range(1, steps):
        lines.append({"step": step, "reward/mean": step / 10 + offset, "train/grad_norm": 0.5, "train/kl_loss": None})
    lines[-1]["eval/demo/t1.0/em"] = 0.5 + offset
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_one_run(tmp_path):
    plot_run(write_run(tmp_path / "run"), tmp_path / "out" / "curves.png")
    height, width, _ = image.imread(tmp_path / "out" / "curves.png").shape
    assert width > height > 500


def test_several_runs(tmp_path):
    runs = [write_run(tmp_path / f"seed{i}", i / 20, 5 + i) for i in range(3)]
    plot_runs(runs, tmp_path / "curves.png")
    plot_runs(runs[:1], tmp_path / "one.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_highest_marker_is_seen_whole():
    _, ax = plt.subplots()
    ax.plot([0, 10, 20], [0.6, 0.9, 1.0])
    _dress(ax, Panel("Searches", "/t1.0/searches"))
    bottom, top = ax.get_ylim()
    plt.close()
    assert bottom == 0
    assert top > 1.04


def test_runs_that_share_a_label_are_refused(tmp_path):
    run = write_run(tmp_path / "run")
    with pytest.raises(ValueError, match="expected 2 different labels"):
        plot_runs([run, run], tmp_path / "curves.png")


def test_evaluations_are_found_by_the_end_of_their_name(tmp_path):
    lines = [json.loads(line) for line in write_run(tmp_path / "run").read_text().splitlines()]
    assert panel_series(lines, EVALUATION_PANELS[0]) == ([0, 5], [0.1, 0.5])
    assert panel_series(lines, Panel("", "/greedy/em")) == ([], [])


def test_the_mean_is_taken_at_steps_that_all_runs_share():
    assert shared_mean([([0, 10, 20], [0.0, 1.0, 2.0]), ([0, 20], [1.0, 4.0])]) == ([0, 20], [0.5, 3.0])


def test_panels_are_of_metrics_that_exist():
    from sleuth.metrics.catalog import describe

    for panel in PANELS:
        assert describe("eval/demo" + panel.metric if panel.metric.startswith("/") else panel.metric) is not None
