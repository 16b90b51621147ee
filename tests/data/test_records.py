"""Reading rows: slices, file kinds, hub paths, and the errors a user can run into."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sleuth.data.records import read_records

ROWS = [{"prompt": f"p{i}", "reward_model": {"ground_truth": {"target": [str(i)]}}} for i in range(5)]


@pytest.fixture(params=["rows.parquet", "rows.jsonl", "rows.jsonl.gz"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    text = "\n".join(map(json.dumps, ROWS)) + "\n\n"
    if path.suffix == ".parquet":
        pd.DataFrame(ROWS).to_parquet(path, row_group_size=2)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "rows", "first"),
    [
        ("", ROWS, 0),
        ("@[1:3]", ROWS[1:3], 1),
        ("@[:2]", ROWS[:2], 0),
        ("@[-2:]", ROWS[-2:], 3),
        ("@[3:99]", ROWS[3:], 3),
        ("@[:-3]", ROWS[:2], 0),
        ("@[-99:-4]", ROWS[:1], 0),
        ("@[1:-1]", ROWS[1:4], 1),
    ],
)
def test_slices_of_every_kind_of_file(path: Path, text: str, rows: list[dict], first: int) -> None:
    records = read_records(f"{path}{text}")
    assert (records.rows, records.first, records.columns) == (rows, first, ["prompt", "reward_model"])


def test_only_the_first_rows(path: Path) -> None:
    for text, first in (("@[1:]", 1), ("@[-4:]", 1), ("@[1:-1]", 1), ("@[2:]", 2)):
        records = read_records(f"{path}{text}", limit=2)
        assert (records.rows, records.first) == (ROWS[first : first + 2], first)
        assert records.columns == ["prompt", "reward_model"]


def test_only_the_columns_that_are_wanted(path: Path) -> None:
    records = read_records(f"{path}@[1:3]", columns={"prompt", "other"})
    assert (records.rows, records.columns) == ([{"prompt": "p1"}, {"prompt": "p2"}], ["prompt", "reward_model"])
    assert read_records(str(path), columns=["other"]).columns == ["prompt", "reward_model"]


@pytest.mark.parametrize(
    ("name", "data"), [("a.parquet", b""), ("a.parquet", b"no parquet"), ("a.jsonl", b'{"a": "\xff"}')]
)
def test_a_file_that_cannot_be_read_says_what_to_do(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"(?s)found .*{name}.*write or download it again"):
        read_records(str(tmp_path / name))


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 500)[:40])
    with pytest.raises(ValueError, match=r"cannot be read in .*download it again"):
        read_records(str(tmp_path / "a.jsonl.gz"))


def test_a_packed_file_that_is_damaged(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b'{"prompt": "x"}\n' * 500))
    packed[30] ^= 0xFF
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    with pytest.raises(ValueError, match=r"cannot be read in .*download it again"):
        read_records(str(tmp_path / "a.jsonl.gz"))


@pytest.mark.parametrize("text", ["@[5:9]", "@[3:2]", "@[-2:1]", "@[0:0]"])
def test_an_empty_slice_is_an_error(path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"has no rows \(the file has 5\)"):
        read_records(f"{path}{text}")


def test_a_missing_column_names_those_found(path: Path) -> None:
    with pytest.raises(ValueError, match=r"column 'answer' \(--label-key\) in .* found prompt, reward_model"):
        read_records(str(path)).require("answer", "--label-key")


def test_two_columns_of_one_name_are_an_error_only_where_they_are_wanted(tmp_path: Path) -> None:
    path = tmp_path / "twice.parquet"
    columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["prompt", "other", "other"]), path)
    with pytest.raises(ValueError, match=r"one column of each name in .*twice.parquet, found 'other' twice"):
        read_records(str(path), ["prompt", "other"])
    assert read_records(str(path), ["prompt"]).rows == [{"prompt": "a"}]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(ValueError, match=r"line 2 of .* is not JSON"):
        read_records(str(path))
    path.write_text(f'{{"a": {"9" * 5000}}}\n')
    with pytest.raises(ValueError, match=r"line 1 of .* is not JSON: Exceeds the limit"):
        read_records(str(path))
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="expected a JSON object on line 1"):
        read_records(str(path))


def test_unknown_kinds_of_file_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(ValueError, match="expected a file that ends in"):
        read_records(str(tmp_path / "rows.csv"))
    with pytest.raises(FileNotFoundError, match="no file"):
        read_records(str(tmp_path / "none.parquet"))


def test_a_path_of_the_hub_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tmp_path / "train.parquet"
    pd.DataFrame(ROWS).to_parquet(local)
    asked = []

    def download(repo: str, file: str, repo_type: str, revision: str | None, endpoint: str | None) -> str:
        asked.append((repo, file, repo_type, revision))
        return str(local)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert read_records("someone/some_set/data/train.parquet@[0:2]").rows == ROWS[:2]
    assert read_records("someone/some_set@v1").rows == ROWS
    read_records("someone/some_set", default_file="test.parquet")
    assert asked == [
        ("someone/some_set", "data/train.parquet", "dataset", None),
        ("someone/some_set", "train.parquet", "dataset", "v1"),
        ("someone/some_set", "test.parquet", "dataset", None),
    ]


def test_the_hubs_refusal_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: str, **__: str) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(FileNotFoundError, match=r"did not give train.parquet of the data set a/b: no network"):
        read_records("a/b/train.parquet")


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    assert read_records(str(path)).rows == [{"prompt": "a"}, {"prompt": "b"}]


def test_lines_end_at_a_line_feed_only(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "where\u2028is\u0085it?\x7f"}\r\n{"prompt":\r"b"}\n', encoding="utf-8", newline="")
    assert read_records(str(path)).rows == [{"prompt": "where\u2028is\u0085it?\x7f"}, {"prompt": "b"}]


def test_what_comes_after_the_rows_wanted_is_not_read(tmp_path: Path) -> None:
    (path := tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a": 2}\nno JSON\n')
    assert read_records(str(path), limit=2).rows == [{"a": 1}, {"a": 2}]
    assert read_records(f"{path}@[1:2]").rows == [{"a": 2}]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Three row groups of 100 rows; all bytes of the values but those of `prompt` in the second are overwritten."""
    path = tmp_path / "rows.parquet"
    table = pa.table({"prompt": [f"{i}" * 50 for i in range(300)], "unused": [["x" * 50, str(i)] for i in range(300)]})
    pq.write_table(table, path, row_group_size=100, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    meta = pq.read_metadata(path)
    for group, column in ((0, 0), (0, 1), (1, 1), (2, 0), (2, 1)):
        chunk = meta.row_group(group).column(column)
        start, size = chunk.data_page_offset, chunk.total_compressed_size
        data[start : start + size] = b"\xff" * size
    path.write_bytes(data)
    return path


def test_columns_and_row_groups_that_are_not_wanted_are_not_read(damaged: Path) -> None:
    records = read_records(f"{damaged}@[100:200]", columns=["prompt"])
    assert [row["prompt"] for row in records.rows] == [f"{i}" * 50 for i in range(100, 200)]
    assert records.columns == ["prompt", "unused"]
    for text, columns in (("@[100:200]", ["unused"]), ("@[99:200]", ["prompt"]), ("@[100:201]", ["prompt"])):
        with pytest.raises(ValueError, match="download it again"):
            read_records(f"{damaged}{text}", columns=columns)


def test_a_look_at_the_first_rows_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    texts = [f"{i:09}" * 100 for i in range(20_000)]
    pq.write_table(pa.table({"prompt": texts, "unused": texts}), path, compression="none", use_dictionary=False)
    opened: list[CountingFile] = []
    real = pq.ParquetFile

    def parquet_file(path: Path, **options: Any) -> pq.ParquetFile:
        opened.append(CountingFile(path))
        return real(pa.PythonFile(opened[-1], mode="r"), **options)

    monkeypatch.setattr("sleuth.data.records.pq.ParquetFile", parquet_file)
    assert len(read_records(str(path), ["prompt"], limit=16).rows) == 16
    assert path.stat().st_size > 36_000_000
    assert sum(file.count for file in opened) < 3_000_000


class CountingFile(io.FileIO):
    """A file that knows how many bytes were read of it."""

    count = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size) or b""
        self.count += len(data)
        return data


def test_a_file_that_pyarrow_cannot_read_is_not_to_be_downloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pd.DataFrame(ROWS).to_parquet(path := tmp_path / "rows.parquet")

    def refuse(*_: Any, **__: Any) -> None:
        raise pa.ArrowNotImplementedError("nested data conversions")

    monkeypatch.setattr("sleuth.data.records._batches", refuse)
    with pytest.raises(ValueError, match=r"pyarrow cannot read it \(nested data conversions\)") as error:
        read_records(str(path))
    assert "download" not in str(error.value)


def test_a_map_is_a_dictionary(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.list_(pa.string()))
    pq.write_table(pa.table({"label": pa.array([[("target", ["a"])], None], kind)}), tmp_path / "m.parquet")
    assert read_records(str(tmp_path / "m.parquet")).rows == [{"label": {"target": ["a"]}}, {"label": None}]


def test_a_text_that_is_not_utf8_names_row_and_column(tmp_path: Path) -> None:
    binary = pa.array([b"fine", b"Par\xed\xa0\xb5is"], pa.binary())
    pq.write_table(
        pa.table({"prompt": pa.Array.from_buffers(pa.string(), 2, binary.buffers())}), tmp_path / "b.parquet"
    )
    with pytest.raises(ValueError, match=r"row 1 of .*b.parquet, column 'prompt' cannot be read"):
        read_records(str(tmp_path / "b.parquet"))
