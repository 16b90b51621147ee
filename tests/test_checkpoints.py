"""Whatever moment a save is cut short at, the tracker names a whole checkpoint and the next save goes through."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sleuth import checkpoints
from sleuth.checkpoints import checkpoint_folder, find_checkpoint

SAVE = """
import os, signal, sys
from pathlib import Path
from sleuth import checkpoints

folder, step, text, keep, exchange, deadline = Path(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:])
if not exchange:
    checkpoints._exchange = lambda *_: False
count = 0
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "open", "ctypes.dlsym")

def die_in_time(event, arguments):  # before each change of a file or folder
    global count
    if event in CHANGES:
        count += 1
        if count == deadline:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(die_in_time)
checkpoints.tidy(folder)
unfinished = checkpoints.unfinished_folder(folder, int(step))
unfinished.mkdir()
for name in ("metadata.json", "weights"):
    (unfinished / name).write_text(text)
checkpoints.publish(unfinished, folder, int(step))
checkpoints.prune(folder, int(step), keep)
"""


def save(folder: Path, step: int, text: str, *, keep: int = 0, exchange: bool = True, deadline: int = 0) -> int:
    """Save in a process of its own, killed before its change number `deadline`; its exit code."""
    numbers = map(str, (step, text, keep, int(exchange), deadline))
    return subprocess.run([sys.executable, "-c", SAVE, str(folder), *numbers], check=False).returncode


def content(folder: Path) -> tuple[str, str]:
    """Of the checkpoint that is found: whole means that its files are of one save."""
    found = find_checkpoint(folder)
    assert found is not None
    return (found / "metadata.json").read_text(), (found / "weights").read_text()


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize(("step", "after"), [(2, {"old 2", "new"}), (3, {"old 2", "new"})])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(
    tmp_path: Path, exchange: bool, step: int, after: set[str]
) -> None:
    """Step 2 is saved a second time, with what an earlier kill left lying about; step 3 is new, and prunes step 1."""
    seen, code, deadline = set(), -signal.SIGKILL, 0
    while code == -signal.SIGKILL:
        deadline += 1
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        for number in (1, 2):
            assert save(tmp_path / "run", number, f"old {number}") == 0
        shutil.copytree(tmp_path / "run/iter_0000001", tmp_path / "run/.unfinished-iter_0000009")
        code = save(tmp_path / "run", step, "new", keep=2, exchange=exchange, deadline=deadline)
        text, weights = content(tmp_path / "run")
        assert text == weights
        seen.add(text)
        if exchange:
            assert not find_checkpoint(tmp_path / "run").name.startswith(".")  # type: ignore[union-attr]
        if code == -signal.SIGKILL and deadline % 3 == 0:  # the next save finds whatever is left
            assert save(tmp_path / "run", step, "next", keep=2) == 0
            assert content(tmp_path / "run") == ("next", "next")
            assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]
    assert code == 0
    assert deadline > 12
    assert seen == after


def test_two_folders_change_places_at_once_where_the_system_can(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    if not checkpoints._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot")
    assert [(tmp_path / name / "file").read_text() for name in ("a", "b")] == ["b", "a"]
    with pytest.raises(OSError, match="No such file"):
        checkpoints._exchange(tmp_path / "a", tmp_path / "missing")


def test_a_replaced_checkpoint_is_put_back_where_the_new_one_never_came(tmp_path: Path) -> None:
    save(tmp_path, 4, "old")
    checkpoint_folder(tmp_path, 4).rename(tmp_path / ".replaced-iter_0000004")  # killed between two renames
    assert content(tmp_path) == ("old", "old")
    checkpoints.tidy(tmp_path)
    assert find_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 4)


def test_the_checkpoint_just_saved_stays_where_later_ones_are_left_of_an_abandoned_run(tmp_path: Path) -> None:
    for step in (20, 25, 40, 60):
        checkpoint_folder(tmp_path, step).mkdir()
    checkpoints.prune(tmp_path, 25, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000025", "iter_0000060"]


def test_the_good_checkpoint_is_kept_and_gone_on_from_instead_of_a_ruined_one(tmp_path: Path) -> None:
    for step in (20, 40, 60):
        save(tmp_path, step, "x")
    assert checkpoints.set_back(tmp_path, 60) is None  # none is known to be good
    checkpoints.mark_good(tmp_path, 20)
    checkpoints.prune(tmp_path, 60, keep=1)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000020", "iter_0000060"]
    assert checkpoints.set_back(tmp_path, 40) is None  # which is not the newest
    assert checkpoints.saved_step(tmp_path) == 60
    assert checkpoints.set_back(tmp_path, 60) == checkpoint_folder(tmp_path, 20)
    assert checkpoints.saved_step(tmp_path) == 20
    assert checkpoints.set_back(tmp_path, 20) is None  # the good one itself
    checkpoints.mark_good(tmp_path, 99)
    assert checkpoints.good_checkpoint(tmp_path) is None  # it is not there


def test_a_tracker_that_names_nothing(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) is None
    save(tmp_path, 4, "x")
    for text, message in (("", "found ''"), ("5x", "found '5x'"), ("7", "iter_0000007, which .* found iter_0000004")):
        (tmp_path / checkpoints.TRACKER).write_text(text)
        with pytest.raises(ValueError, match=message):
            find_checkpoint(tmp_path)
    assert find_checkpoint(tmp_path, 4) == checkpoint_folder(tmp_path, 4)
    assert find_checkpoint(checkpoint_folder(tmp_path, 4)) == checkpoint_folder(tmp_path, 4)
