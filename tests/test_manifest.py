"""Damage to a checkpoint's files is found, and named with an older checkpoint that is whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sleuth import manifest
from sleuth.checkpoints import checkpoint_folder
from sleuth.manifest import MANIFEST, content_problems, newest_whole, read_manifest, size_problems, write_manifest

SIZE = 300_000


def make_checkpoint(folder: Path, step: int) -> Path:
    place = checkpoint_folder(folder, step)
    place.mkdir(parents=True)
    (place / "metadata.json").write_text("{}")
    (place / "__0_0.distcp").write_bytes(bytes(range(256)) * (SIZE // 256))
    write_manifest(place)
    return place


def flip(path: Path, count: int = 64) -> None:
    """Change `count` bytes in the middle of a file."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + count] = bytes(255 - byte for byte in data[middle : middle + count])
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "has other content than when it was saved": flip,
    "has 1000 bytes instead of 299776": lambda path: path.write_bytes(path.read_bytes()[:1000]) and None,
    "is empty": lambda path: path.write_bytes(b"") and None,
    "is missing": Path.unlink,
}


@pytest.mark.parametrize("found", DAMAGES)
def test_each_damage_is_named(tmp_path: Path, found: str) -> None:
    place = make_checkpoint(tmp_path, 3)
    entries = read_manifest(place)
    assert entries is not None
    assert content_problems(place, entries) == size_problems(place, entries) == []
    DAMAGES[found](place / "__0_0.distcp")
    (problem,) = content_problems(place, entries)
    assert problem.startswith(f"{place / '__0_0.distcp'} {found}")
    assert size_problems(place, entries) == ([] if found.startswith("has other content") else [problem])


def test_a_single_bit_anywhere_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_BLOCK_BYTES", 1000)  # the file is read in many pieces, the last of them short
    place = make_checkpoint(tmp_path, 3)
    entries, path = read_manifest(place), place / "__0_0.distcp"
    assert entries is not None
    whole = path.read_bytes()
    for position in (0, 999, 1000, SIZE // 2, len(whole) - 1):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert len(content_problems(place, entries)) == 1
    path.write_bytes(whole)
    assert content_problems(place, entries) == []


def test_checksums_that_are_known_are_taken_and_other_files_are_read(tmp_path: Path) -> None:
    place = make_checkpoint(tmp_path, 3)
    entries = read_manifest(place)
    assert entries is not None
    assert entries.keys() == {"metadata.json", "__0_0.distcp"}
    (place / "config.yaml").write_text("written when the checkpoint is in its place")
    (place / "later").write_text("x")
    known = {"__0_0.distcp": manifest.Entry(1, "known")}
    write_manifest(place, known)
    again = read_manifest(place)
    assert again is not None
    assert again.keys() == {"metadata.json", "__0_0.distcp", "later"}
    assert again["__0_0.distcp"] == known["__0_0.distcp"]
    assert again["metadata.json"] == entries["metadata.json"]


def test_the_newest_older_checkpoint_that_is_whole(tmp_path: Path) -> None:
    places = {step: make_checkpoint(tmp_path, step) for step in (10, 20, 30, 40, 50, 60)}
    flip(places[40] / "__0_0.distcp")
    (places[30] / MANIFEST).unlink()  # from before there were manifests: nobody knows
    (places[20] / MANIFEST).write_text("{")
    assert newest_whole(tmp_path, 60) == places[50]
    assert newest_whole(tmp_path, 50) == places[10]
    assert newest_whole(tmp_path, 10) is None
    (places[60] / "metadata.json").write_text("")
    with pytest.raises(ValueError, match=rf"{places[60]}/metadata.json is empty; the newest older .* {places[50]}: "):
        manifest.check_sizes(places[60])
    (places[10] / "metadata.json").write_text("")
    with pytest.raises(ValueError, match=rf"no older one in {tmp_path} is known to be whole, or copy"):
        manifest.check_sizes(places[10])
    manifest.check_sizes(places[30])


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 2, "algorithm": "xxh3_128", "files": {}}'])
def test_a_manifest_that_is_damaged_itself(tmp_path: Path, text: str) -> None:
    place = make_checkpoint(tmp_path, 3)
    (place / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=rf"expected a manifest of format 1 .* in {place / MANIFEST}, found something"):
        read_manifest(place)
    (place / MANIFEST).write_text(json.dumps({"format": 1, "algorithm": "xxh3_128", "files": {"a": [1, "b"]}}))
    assert read_manifest(place) == {"a": (1, "b")}
