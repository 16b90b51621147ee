import json

import pytest

from tools.demo.report import FEWEST_STEPS, LEAST_RISE, main, summarize

STEPS = FEWEST_STEPS
ONE_HOP = {"demo_creator": 30, "demo_birth_year": 120}
TWO_HOP = 50


def evaluation(step, em, greedy, name="demo", searches=1.25, two_hop=None):
    """The line of an evaluation; with `two_hop` (exact match, searches) also by data source: 150 and 50 questions."""
    line = {
        "step": step,
        "timestamp": 1000.0 + 10 * step,
        f"eval/{name}/t1.0/em": em,
        f"eval/{name}/greedy/em": greedy,
        f"eval/{name}/t1.0/format": 0.5,
        f"eval/{name}/t1.0/searches": searches,
        f"eval/{name}/t1.0/reward": em,
        f"eval/{name}/t1.0/questions": 200,
        f"eval/{name}/t1.0/macro/em": 7.0,
    }
    sources = {"demo_two_hop": (TWO_HOP, *two_hop)} if two_hop else {}
    sources |= {"demo_creator": (30, 0.9, 1.0), "demo_birth_year": (120, 0.4, 0.5)} if two_hop else {}
    for source, (questions, source_em, source_searches) in sources.items():
        for part in ("t1.0", "greedy"):
            prefix = f"eval/{name}/{part}/source/{source}/"
            line |= {f"{prefix}questions": questions, f"{prefix}em": source_em, f"{prefix}searches": source_searches}
    return line


def training(step):
    return {"step": step, "timestamp": 1000.0 + 10 * step, "reward/mean": 0.5}


def run_with(lines, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text("hf_checkpoint: data/demo/model\nseed: 7\n")
    return tmp_path


def risen(key, by=0.0):
    return 0.10 + LEAST_RISE[key] + by


def test_a_run_that_learned(tmp_path, capsys):
    after = risen("exact_match_t1"), risen("exact_match_greedy")
    run = run_with([evaluation(0, 0.10, 0.10), training(1), evaluation(2, *after)], tmp_path)
    assert main(["--run-dir", str(run), "--require-goal"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    rise = LEAST_RISE["exact_match_t1"]
    assert summary["table"]["exact_match_t1"] == {"before": 0.10, "after": after[0], "change": pytest.approx(rise)}
    assert summary["goal"]["reached"] is True
    assert (summary["model"], summary["seed"], summary["steps"]) == ("data/demo/model", 7, 2)
    assert (summary["seconds"], summary["questions"], summary["missing"]) == (20.0, 200, [])
    assert (run / "curves.png").stat().st_size > 10_000
    out = capsys.readouterr().out
    assert f"+{rise:.3f}" in out
    assert "200 held-out questions" in out
    assert "goal reached" in out
    assert "Where to look next" in out


@pytest.mark.parametrize(
    ("short_of", "reason"),
    [("exact_match_t1", "exact match, T = 1 did not"), ("exact_match_greedy", "exact match, greedy did not")],
)
def test_a_run_that_missed_the_goal_says_why(tmp_path, capsys, short_of, reason):
    t1, greedy = (risen(key, -0.01 * (key == short_of)) for key in ("exact_match_t1", "exact_match_greedy"))
    run = run_with([evaluation(0, 0.10, 0.10), evaluation(STEPS, t1, greedy)], tmp_path)
    assert main(["--run-dir", str(run)]) == 0
    assert main(["--run-dir", str(run), "--require-goal"]) == 1
    assert f": {reason}" in " ".join(capsys.readouterr().out.split())


def test_a_short_run_that_missed_the_goal_is_too_short_to_tell(tmp_path, capsys):
    run = run_with([evaluation(0, 0.10, 0.60), evaluation(2, 0.10, 0.60)], tmp_path)
    assert main(["--run-dir", str(run), "--require-goal"]) == 1
    assert json.loads((run / "summary.json").read_text())["goal"]["reached"] is None
    out = " ".join(capsys.readouterr().out.split())
    assert "2 steps are too few to tell" in out
    assert "not reached" not in out


def test_one_hop_and_two_hop_questions_are_counted_apart(tmp_path, capsys):
    lines = [evaluation(0, 0.1, 0.1, two_hop=(0.02, 0.25)), evaluation(2, 0.6, 0.7, two_hop=(0.3, 1.75))]
    main(["--run-dir", str(run_with(lines, tmp_path))])
    hops = json.loads((tmp_path / "summary.json").read_text())["hops"]
    assert hops["two_hop"]["exact_match_t1"] == {"before": 0.02, "after": 0.3, "change": pytest.approx(0.28)}
    assert hops["two_hop"]["searches_t1"]["change"] == 1.5
    assert hops["one_hop"]["exact_match_greedy"]["before"] == pytest.approx((30 * 0.9 + 120 * 0.4) / 150)
    assert hops["one_hop"]["searches_t1"]["after"] == pytest.approx((30 * 1.0 + 120 * 0.5) / 150)
    assert (hops["one_hop"]["questions"]["after"], hops["two_hop"]["questions"]["after"]) == (150, 50)
    out = capsys.readouterr().out
    assert "one-hop (150 questions)" in out
    assert "two-hop (50 questions)" in out


def test_without_data_sources_the_hops_are_missing(tmp_path, capsys):
    main(["--run-dir", str(run_with([evaluation(0, 0.1, 0.1), evaluation(2, 0.6, 0.7)], tmp_path))])
    hops = json.loads((tmp_path / "summary.json").read_text())["hops"]
    assert hops["two_hop"]["exact_match_t1"] == {"before": None, "after": None, "change": None}
    assert "two-hop (number missing)" in capsys.readouterr().out


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


def test_a_final_answer_is_the_valid_format_of_tool_calls():
    lines = [evaluation(0, 0.1, 0.5), evaluation(2, 0.1, 0.5)]
    for line, answered in zip(lines, (0.25, 0.75), strict=True):
        del line["eval/demo/t1.0/format"]
        line["eval/demo/t1.0/answered"] = answered
    summary = summarize(lines, {})
    assert summary["table"]["format_t1"] == {"before": 0.25, "after": 0.75, "change": 0.5}
    assert summary["missing"] == []


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


def test_a_damaged_file_of_a_run_is_named(tmp_path, capsys):
    for name, text in (("config.yaml", "{a: ["), ("metrics.jsonl", "torn\n{}\n")):
        run_with([training(1)], tmp_path)
        (tmp_path / name).write_text(text)
        with pytest.raises(SystemExit):
            main(["--run-dir", str(tmp_path)])
        assert f"{name}" in capsys.readouterr().err
