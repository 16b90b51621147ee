import json

import pytest

from tools.plot_runs import default_labels, main


@pytest.fixture
def runs(tmp_path):
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    return folders


def configure(runs, *texts):
    for run, text in zip(runs, texts, strict=True):
        (run / "config.yaml").write_text(text)


def test_runs_are_named_by_their_folders(runs, tmp_path):
    configure(runs, "seed: 0\n", "seed: 1\n")
    assert default_labels(runs) == ["a", "b"]
    assert default_labels([tmp_path / "x" / "a", *runs])[0] == "x/a"


@pytest.mark.parametrize(
    ("texts", "mean", "printed"),
    [
        (["seed: 0\nlr: 1\nrun_dir: a\n", "seed: 1\nlr: 1\nrun_dir: b\n"], True, "seed: a 0, b 1"),
        (["seed: 0\nlr: 1\n", "seed: 1\nlr: 2\n"], False, "lr: a 1, b 2"),
    ],
)
def test_a_mean_is_drawn_only_where_all_else_is_equal(runs, tmp_path, monkeypatch, capsys, texts, mean, printed):
    configure(runs, *texts)
    drawn = []
    monkeypatch.setattr("tools.plot_runs.plot_runs", lambda *_, **options: drawn.append(options["mean"]))
    assert main([*map(str, runs), "--output", str(tmp_path / "x.png")]) == 0
    assert drawn == [mean]
    assert printed in capsys.readouterr().out.splitlines()


def test_any_metric_can_be_drawn_and_one_that_no_run_has_is_named(runs, tmp_path, capsys):
    usual, one = tmp_path / "usual.png", tmp_path / "one.png"
    assert main([*map(str, runs), "--output", str(usual)]) == 0
    assert main([*map(str, runs), "--output", str(one), "--metric", "reward/mean"]) == 0
    assert 5_000 < one.stat().st_size < usual.stat().st_size
    with pytest.raises(SystemExit):
        main([*map(str, runs), "--output", str(one), "--metric", "reward/mea"])
    assert "no run logged reward/mea; did you mean reward/mean?" in capsys.readouterr().err


def test_a_png_is_written(runs, tmp_path):
    png = tmp_path / "out" / "curves.png"
    assert main([*map(str, runs), "--output", str(png)]) == 0
    assert png.stat().st_size > 10_000


def test_the_table_shows_before_and_after_and_what_is_missing(runs, tmp_path, capsys):
    numbers = {"exact_match_greedy": {"before": 0.1, "after": 0.4}, "format_t1": {"before": None, "after": 0.5}}
    hops = {"two_hop": {"searches_t1": {"before": 0.25, "after": 2.0}}}
    (runs[0] / "summary.json").write_text(json.dumps({"table": numbers, "hops": hops, "steps": 50, "seconds": 400.5}))
    assert main([*map(str, runs), "--output", str(tmp_path / "curves.png")]) == 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.startswith("| a | 0.100 -> 0.400 | missing -> missing |")
    assert "| missing -> missing | 0.250 -> 2.000 | missing" in first
    assert first.endswith("| missing -> 0.500 | 50 | 400.5 |")
    assert second.endswith("| missing | missing |")


@pytest.mark.parametrize(
    ("extra", "message"), [(["nowhere"], "found none in nowhere"), (["--labels", "x"], "expected 2 different labels")]
)
def test_bad_arguments(runs, tmp_path, capsys, extra, message):
    with pytest.raises(SystemExit):
        main([*map(str, runs), *extra, "--output", str(tmp_path / "x.png")])
    assert message in capsys.readouterr().err


def test_runs_without_a_configuration_are_no_repetitions_and_without_a_summary_there_is_no_table(
    runs, tmp_path, monkeypatch, capsys
):
    (runs[0] / "config.yaml").write_text("seed: 1\n")
    drawn = []
    monkeypatch.setattr("tools.plot_runs.plot_runs", lambda *_, **options: drawn.append(options["mean"]))
    assert main([*map(str, runs), "--output", str(tmp_path / "x.png")]) == 0
    assert drawn == [False]
    out = capsys.readouterr().out
    assert "b has no config.yaml" in out
    assert "missing" not in out


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.yaml", "{a: [", "config.yaml, which has none"),
        ("config.yaml", "[1]", "found list"),
        ("summary.json", "{", "summary.json, which has none"),
        ("metrics.jsonl", "torn\n{}\n", "line 1: expected a JSON object"),
    ],
)
def test_a_damaged_file_is_named(runs, tmp_path, capsys, file, text, message):
    (runs[1] / file).write_text(text)
    with pytest.raises(SystemExit):
        main([*map(str, runs), "--output", str(tmp_path / "x.png")])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x.unknown", "file/x.png"])
def test_a_picture_that_cannot_be_written_is_told(runs, tmp_path, capsys, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        main([*map(str, runs), "--output", str(tmp_path / name)])
    assert "expected the name of a PNG that can be written" in capsys.readouterr().err


def test_a_run_named_twice_and_a_metric_without_numbers_are_refused(runs, tmp_path, capsys):
    for extra, message in (
        ([str(runs[0])], "found the same folder twice"),
        (["--labels", "a", "a"], "expected 2 different labels"),
        (["--metric", "text"], "no run logged text; metrics.jsonl has the names"),
    ):
        (runs[0] / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "text": "x"}\n')
        with pytest.raises(SystemExit):
            main([*map(str, runs), *extra, "--output", str(tmp_path / "x.png")])
        assert message in capsys.readouterr().err
