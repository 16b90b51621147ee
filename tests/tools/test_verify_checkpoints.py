"""A folder of checkpoints is looked through, and what is damaged is named."""

from pathlib import Path

import pytest

from sleuth.manifest import MANIFEST
from tests.test_manifest import flip, make_checkpoint
from tools.verify_checkpoints import main


def said(capsys: pytest.CaptureFixture[str], *words: Path) -> tuple[int, list[str]]:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, words)])
    code = ended.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().out.splitlines()


def test_each_checkpoint_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [make_checkpoint(tmp_path, step) for step in (1, 2, 3)]
    (places[0] / MANIFEST).unlink()
    code, lines = said(capsys, tmp_path)
    assert (code, len(lines)) == (0, 3)
    assert lines[0] == f"{places[0]}: not verified: it was saved without a manifest.json"
    assert lines[1].startswith(f"{places[1]}: whole: 2 files, 0.000 GB, ")
    flip(places[2] / "__0_0.distcp")
    assert said(capsys, places[1])[0] == 0
    code, (line,) = said(capsys, places[2])
    assert (code, line) == (
        1,
        f"{places[2]}: damaged: {places[2]}/__0_0.distcp has other content than when it was saved (its checksum "
        "differs)",
    )
    assert said(capsys, tmp_path)[0] == 1


def test_a_folder_without_checkpoints_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"expected checkpoints .* in {tmp_path}, found none"):
        main([str(tmp_path)])
