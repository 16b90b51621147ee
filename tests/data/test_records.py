"""Reading rows: slices, file kinds, hub paths, and the errors a user can run into."""

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sleuth.data.records import DataPath, plain, read_records

ROWS = [{"prompt": f"p{i}", "reward_model": {"ground_truth": {"target": [str(i)]}}} for i in range(5)]


@pytest.fixture(params=["rows.parquet", "rows.jsonl", "rows.jsonl.gz"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    text = "\n".join(map(json.dumps, ROWS)) + "\n\n"
    if path.suffix == ".parquet":
        pd.DataFrame(ROWS).to_parquet(path)
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
    ],
)
def test_slices_of_every_kind_of_file(path: Path, text: str, rows: list[dict], first: int) -> None:
    records = read_records(f"{path}{text}")
    assert (records.rows, records.first, records.columns) == (rows, first, ["prompt", "reward_model"])


def test_only_the_first_rows(path: Path) -> None:
    records = read_records(f"{path}@[1:]", limit=2)
    assert (records.rows, records.first, records.columns) == (ROWS[1:3], 1, ["prompt", "reward_model"])


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


@pytest.mark.parametrize("text", ["@[5:9]", "@[3:2]"])
def test_an_empty_slice_is_an_error(path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"has no rows \(the file has 5\)"):
        read_records(f"{path}{text}")


@pytest.mark.parametrize("text", ["a.parquet@[1]", "a.parquet@[a:b]", "a.parquet@[1:2:3]", "a.parquet@[1:2"])
def test_a_broken_slice_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected path@\[a:b\]"):
        DataPath.parse(text)


def test_a_missing_column_names_those_found(path: Path) -> None:
    with pytest.raises(ValueError, match=r"column 'answer' \(--label-key\) in .* found prompt, reward_model"):
        read_records(str(path)).require("answer", "--label-key")


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(ValueError, match=r"line 2 of .* is not JSON"):
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

    def download(repo: str, file: str, repo_type: str) -> str:
        asked.append((repo, file, repo_type))
        return str(local)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert read_records("someone/some_set/data/train.parquet@[0:2]").rows == ROWS[:2]
    assert asked == [("someone/some_set", "data/train.parquet", "dataset")]


def test_the_hubs_refusal_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: str, **__: str) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(FileNotFoundError, match=r"did not give train.parquet of the data set a/b: no network"):
        read_records("a/b/train.parquet")


def test_numpy_becomes_plain() -> None:
    value = {"a": np.array([{"role": "user"}], dtype=object), "b": np.int64(3), "c": [np.float32(0.5)]}
    assert plain(value) == {"a": [{"role": "user"}], "b": 3, "c": [0.5]}


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    assert read_records(str(path)).rows == [{"prompt": "a"}, {"prompt": "b"}]
