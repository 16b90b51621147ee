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


def test_runs_are_named_by_their_seeds_if_these_differ(runs):
    assert default_labels(runs) == ["a", "b"]
    for seed, run in enumerate(runs):
        (run / "config.yaml").write_text(f"seed: {seed}\n")
    assert default_labels(runs) == ["seed 0", "seed 1"]
    (runs[0] / "config.yaml").write_text("seed: 1\n")
    assert default_labels(runs) == ["a", "b"]


def test_a_png_is_written(runs, tmp_path):
    png = tmp_path / "out" / "curves.png"
    assert main([*map(str, runs), "--output", str(png)]) == 0
    assert png.stat().st_size > 10_000


def test_the_table_shows_before_and_after_and_what_is_missing(runs, tmp_path, capsys):
    numbers = {"exact_match_greedy": {"before": 0.1, "after": 0.4}, "format_t1": {"before": None, "after": 0.5}}
    hops = {"two_hop": {"searches_t1": {"before": 0.25, "after": 2.0}}}
    (runs[0] / "summary.json").write_text(json.dumps({"table": numbers, "hops": hops, "steps": 50, "seconds": 400.5}))
    assert main([*map(str, runs), "--output", str(tmp_path / "curves.png")]) == 0
    first, second = capsys.readouterr().out.splitlines()[2:]
    assert first.startswith("| a | 0.100 -> 0.400 | missing -> missing |")
    assert "| missing -> missing | 0.250 -> 2.000 | missing" in first
    assert first.endswith("| missing -> 0.500 | 50 | 400.5 |")
    assert second.endswith("| missing | missing |")


@pytest.mark.parametrize(
    ("extra", "message"), [(["nowhere"], "found none in nowhere"), (["--labels", "x"], "expected 2 labels")]
)
def test_bad_arguments(runs, tmp_path, capsys, extra, message):
    with pytest.raises(SystemExit):
        main([*map(str, runs), *extra, "--output", str(tmp_path / "x.png")])
    assert message in capsys.readouterr().err
