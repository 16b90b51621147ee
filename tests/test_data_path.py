"""`path`, `path@[a:b]` and files of the hub."""

from pathlib import Path

import pytest

from sleuth.data_path import DataPath


@pytest.mark.parametrize(
    ("text", "path", "rows"),
    [
        ("a.parquet", "a.parquet", slice(None)),
        ("a.parquet@[0:5]", "a.parquet", slice(0, 5)),
        ("a@b/c.jsonl@[-3:]", "a@b/c.jsonl", slice(-3, None)),
        ("a.jsonl@[:]", "a.jsonl", slice(None)),
    ],
)
def test_a_path_and_its_rows(text: str, path: str, rows: slice) -> None:
    assert DataPath.parse(text) == DataPath(path, rows)


@pytest.mark.parametrize("text", ["a@[1]", "a@[a:b]", "a@[1:2:3]", "a@[1:2", "a@[-:2]", "a@[1:2]x"])
def test_a_broken_slice_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a slice path@\[a:b\] with whole numbers a and b, found a@\["):
        DataPath.parse(text)


def test_files_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    file = ("owner/some_set", "data/train.parquet", None)
    assert DataPath.parse("owner/some_set/data/train.parquet@[0:2]").hub_file == file
    assert DataPath.parse("owner/some_set@[0:2]").hub_file == ("owner/some_set", None, None)
    assert DataPath.parse("owner/set@v1.0/a.jsonl@[:2]").hub_file == ("owner/set", "a.jsonl", "v1.0")
    for local in ("/owner/set/train.parquet", "./set/train.parquet", "set/train.parquet", "data/set/train.parquet"):
        assert DataPath.parse(local).hub_file is None
