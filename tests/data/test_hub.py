"""Files of data sets come from a hub, once, and its refusal says what to do. The hub is a local server."""

from __future__ import annotations

from pathlib import Path

import pytest

from sleuth.data.hub import fetch
from sleuth.data.records import read_records
from tests.hub import serve_hub

LINES = b'{"prompt": "a"}\n{"prompt": "b"}\n'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_a_file_is_downloaded_at_its_first_use_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_hub({"owner/set/train.jsonl": LINES}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert read_records("owner/set/train.jsonl@[1:2]").rows == [{"prompt": "b"}]
        assert "downloading train.jsonl of the data set owner/set" in capsys.readouterr().err
        assert read_records("owner/set", default_file="train.jsonl").rows[0] == {"prompt": "a"}
        assert hub.gets == [("owner/set/train.jsonl", "main")]
        assert capsys.readouterr().err == ""


def test_what_the_hub_lacks_is_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_hub({}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(FileNotFoundError, match=r"(?s)did not give a.jsonl of the data set owner/set.*hf download"):
            fetch("owner/set", "a.jsonl")
