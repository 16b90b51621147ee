from tools.run_dir import metric_series


def test_series_leave_out_what_is_missing():
    lines = [{"step": 0, "em": 0.1}, {"step": 1}, {"step": 2, "em": None}, {"step": 3, "em": 0.4}]
    assert metric_series(lines, "em") == ([0, 3], [0.1, 0.4])
