import pytest

from tools.run_dir import metric_series, read_configuration, read_summary


def test_series_leave_out_what_is_missing():
    lines = [{"step": 0, "em": 0.1}, {"step": 1}, {"step": 2, "em": None}, {"step": 3, "em": 0.4}]
    assert metric_series(lines, "em") == ([0, 3], [0.1, 0.4])


@pytest.mark.parametrize(("read", "name"), [(read_configuration, "config.yaml"), (read_summary, "summary.json")])
def test_a_damaged_file_is_named_and_a_missing_one_is_empty(tmp_path, read, name):
    assert read(tmp_path) == {}
    for text in ("{a: [", "[1, 2]", ""):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=rf"expected .* in .*{name}.*; restore the file, or remove it"):
            read(tmp_path)
