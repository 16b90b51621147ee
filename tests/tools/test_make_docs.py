import pytest

from sleuth.sample import SampleStatus, StopReason
from tools import make_docs


@pytest.mark.parametrize("name", sorted(make_docs.PAGES))
def test_generated_pages_are_current(name):
    page = (make_docs.DOCS / name).read_text(encoding="utf-8")
    assert page == make_docs.PAGES[name](), f"docs/{name} is not current: run python tools/make_docs.py"


def test_every_reason_and_status_is_explained():
    assert set(make_docs.member_docstrings(StopReason)) == set(StopReason)
    assert set(make_docs.member_docstrings(SampleStatus)) == set(SampleStatus)


def test_stale_pages_are_named_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_docs, "DOCS", tmp_path)
    assert make_docs.main(["--check"]) == 1
    assert "docs/metrics.md is not current" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert make_docs.main([]) == 0
    assert make_docs.main(["--check"]) == 0
