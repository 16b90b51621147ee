"""Parents that exist, and modes of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sleuth.paths import follow_umask, nearest_existing


def test_the_nearest_parent_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nearest_existing(tmp_path) == tmp_path
    assert nearest_existing(tmp_path / "a/b/c") == tmp_path
    (tmp_path / "a").write_text("a file in the way")
    assert nearest_existing(tmp_path / "a/b") == tmp_path / "a"
    monkeypatch.chdir(tmp_path)
    assert nearest_existing(Path("x/y")) == tmp_path


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_get_the_mode_of_new_ones(tmp_path: Path, umask: int, mode: int) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("mine", "inner/deep"):
        (tmp_path / name).touch(0o600)
    before = os.umask(umask)
    try:
        follow_umask(tmp_path)
        assert os.umask(umask) == umask, "the umask is as it was"
    finally:
        os.umask(before)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("mine", "inner/deep")} == {mode}
