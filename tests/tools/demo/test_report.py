import json

import pytest

from tools.demo.report import main, summarize


def evaluation(step, em, greedy, name="demo"):
    return {
        "step": step,
        "timestamp": 1000.0 + 10 * step,
        f"eval/{name}/t1.0/em": em,
        f"eval/{name}/greedy/em": greedy,
        f"eval/{name}/t1.0/format": 0.5,
        f"eval/{name}/t1.0/searches": 1.25,
        f"eval/{name}/t1.0/reward": em,
        f"eval/{name}/t1.0/questions": 200,
        f"eval/{name}/t1.0/source/x/em": 9.0,
    }


def training(step):
    return {"step": step, "timestamp": 1000.0 + 10 * step, "reward/mean": 0.5}


def run_with(lines, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text("hf_checkpoint: data/demo/model\nseed: 7\n")
    return tmp_path


def test_a_run_that_learned(tmp_path, capsys):
    run = run_with([evaluation(0, 0.10, 0.60), training(1), evaluation(2, 0.35, 0.57)], tmp_path)
    assert main(["--run-dir", str(run), "--require-goal"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["table"]["exact_match_t1"] == {"before": 0.10, "after": 0.35, "change": pytest.approx(0.25)}
    assert summary["goal"]["reached"] is True
    assert (summary["model"], summary["seed"], summary["steps"]) == ("data/demo/model", 7, 2)
    assert (summary["seconds"], summary["questions"], summary["missing"]) == (20.0, 200, [])
    assert (run / "curves.png").stat().st_size > 10_000
    out = capsys.readouterr().out
    assert "+0.250" in out
    assert "200 held-out questions" in out
    assert "goal reached" in out


@pytest.mark.parametrize(
    ("em", "greedy", "reason"),
    [(0.30, 0.60, "exact match did not rise enough"), (0.40, 0.56, "greedy exact match fell")],
)
def test_a_run_that_missed_the_goal_says_why(tmp_path, capsys, em, greedy, reason):
    run = run_with([evaluation(0, 0.10, 0.60), evaluation(10, em, greedy)], tmp_path)
    assert main(["--run-dir", str(run)]) == 0
    assert main(["--run-dir", str(run), "--require-goal"]) == 1
    assert reason in capsys.readouterr().out.replace("\n", " ")


def test_a_short_run_that_missed_the_goal_is_too_short_to_tell(tmp_path, capsys):
    run = run_with([evaluation(0, 0.10, 0.60), evaluation(2, 0.10, 0.60)], tmp_path)
    assert main(["--run-dir", str(run), "--require-goal"]) == 1
    assert json.loads((run / "summary.json").read_text())["goal"]["reached"] is None
    out = " ".join(capsys.readouterr().out.split())
    assert "2 steps are too few to tell" in out
    assert "not reached" not in out


def test_missing_numbers_are_said_to_be_missing(tmp_path, capsys):
    lines = [training(1), evaluation(2, 0.4, 0.6)]
    assert main(["--run-dir", str(run_with(lines, tmp_path)), "--require-goal"]) == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["table"]["exact_match_t1"] == {"before": None, "after": 0.4, "change": None}
    assert summary["goal"]["reached"] is None
    assert "Exact match, T = 1, before" in summary["missing"]
    assert "cannot be told" in capsys.readouterr().out


def test_an_evaluation_before_training_only_is_no_after():
    summary = summarize([evaluation(0, 0.1, 0.5), training(1)], {})
    assert summary["table"]["exact_match_t1"]["after"] is None


def test_seconds_count_from_the_start_that_is_given():
    assert summarize([evaluation(0, 0.1, 0.5)], {}, started=900.0, now=1500.0)["seconds"] == 600.0


def test_no_lines_at_all():
    summary = summarize([], {})
    assert (summary["steps"], summary["seconds"], summary["model"]) == (0, None, None)
    assert len(summary["missing"]) == 10


def test_a_folder_without_metrics(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--run-dir", str(tmp_path)])
    assert "metrics.jsonl" in capsys.readouterr().err
