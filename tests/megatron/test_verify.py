"""Real checkpoints that are damaged, old or a stranger's: what is loaded, what is refused, and what is said."""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from sleuth.arguments import Args, ArgumentsError, check_files, parse_args
from sleuth.checkpoints import TRACKER
from sleuth.cluster.preflight import unverified
from sleuth.manifest import MANIFEST, content_problems, read_manifest
from sleuth.megatron.convert import hf_to_torch_dist, torch_dist_to_hf
from sleuth.megatron.stored_metadata import read_metadata, restricted
from tests.megatron.harness import Task, make_args, new_trainer, run_tasks, save_tiny_model
from tests.test_manifest import DAMAGES, flip

pytestmark = pytest.mark.megatron


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with two equal checkpoints, of steps 0 and 1; the model is beside it."""
    model = save_tiny_model(tmp_path / "model", "qwen2")
    older = hf_to_torch_dist(model, tmp_path / "save", check=False)
    shutil.copytree(older, tmp_path / "save/iter_0000001")
    (tmp_path / "save" / TRACKER).write_text("1")
    return tmp_path / "save"


def export(saved: Path, **flags: Any) -> Path:
    """Read the newest checkpoint."""
    shutil.rmtree(saved.parent / "hf", ignore_errors=True)
    return torch_dist_to_hf(saved, saved.parent / "model", saved.parent / "hf", check=False, **flags)


def arguments(saved: Path, *flags: str) -> Args:
    data = ["--prompt-data", __file__, "--hf-checkpoint", str(saved.parent / "model"), "--colocate"]
    return parse_args([*data, "--custom-rm-path", "a.b", "--load", str(saved), *flags])


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", ".metadata"])
def test_a_damaged_checkpoint_is_named_with_an_older_one(saved: Path, name: str, damage: str) -> None:
    found = saved / "iter_0000001"
    whole = (found / name).read_bytes()
    DAMAGES[damage](found / name)
    expected = rf"found it damaged: {found / name} .*; the newest older .* is {saved / 'iter_0000000'}: name that one"
    with pytest.raises(ValueError, match=expected):
        export(saved)
    if not damage.startswith("has other content"):  # told before anything starts, and whatever the flags say
        with pytest.raises(ArgumentsError, match=f"--load: .*{found / name}"):
            check_files(arguments(saved, "--finetune"))
        with pytest.raises(ValueError, match=str(found / name)):
            export(saved, verify=False)
    (found / name).write_bytes(whole)
    assert export(saved) == found


def test_flipped_bytes_of_weights_are_loaded_only_if_nobody_is_to_look(saved: Path) -> None:
    flip(saved / "iter_0000001/__0_0.distcp")
    assert export(saved, verify=False) == saved / "iter_0000001"


def test_a_checkpoint_from_before_there_were_manifests(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = saved / "iter_0000001"
    assert list(unverified(arguments(saved, "--finetune"))) == []
    (found / MANIFEST).unlink()
    with caplog.at_level(logging.WARNING):
        assert export(saved) == found
    assert f"{found} was saved without a manifest.json: its content is not verified" in caplog.text
    (told,) = unverified(arguments(saved, "--finetune"))
    assert told.startswith(f"--load: {found} was saved without checksums (manifest.json)")
    assert list(unverified(arguments(saved, "--finetune", "--no-verify"))) == []
    data = found / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:5000])
    with pytest.raises(ValueError, match=rf"{data} has 5000 bytes, expected at least \d+; the newest older"):
        export(saved)


def test_a_strangers_metadata_runs_nothing(saved: Path, tmp_path: Path) -> None:
    found = saved / "iter_0000001"
    (found / MANIFEST).unlink()
    (found / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "mark")))
    with pytest.raises(ValueError, match=r"alone in .*/\.metadata, found posix.mkdir, which could run a stranger's"):
        export(saved)
    assert not (tmp_path / "mark").exists()
    with pytest.raises(AttributeError):
        FileSystemReader(found).read_metadata()
    assert (tmp_path / "mark").exists()  # the test can fail: torch alone runs it


def test_metadata_may_name_no_file_elsewhere(saved: Path) -> None:
    found = saved / "iter_0000001"
    (found / MANIFEST).unlink()
    metadata = read_metadata(found)
    for place in metadata.storage_data.values():
        place.relative_path = "../iter_0000000/__0_0.distcp"
    (found / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="names a file outside of the checkpoint"):
        export(saved)


def ranks_task(rank: int, world: int, folder: str, save: str, **flags: Any) -> dict[str, str]:
    """Save twice, damage a file that the second rank reads; what each says, with and without the older checkpoint."""
    trainer = new_trainer(make_args(folder, world, save=save, **flags))
    for step in (1, 2):
        trainer.save(step, {})
        trainer.finish_save()
    newest = Path(save) / "iter_0000002"
    entries = read_manifest(newest)
    assert entries is not None
    assert entries.keys() == {path.name for path in newest.iterdir()} - {MANIFEST}
    assert content_problems(newest, entries) == []
    new_trainer(make_args(folder, world, load=save, **flags))
    if rank == 0:
        flip(newest / sorted(entries, key=lambda name: (-entries[name].bytes, name))[1])
    said = {}
    for what in ("older", "alone"):
        torch.distributed.barrier()
        try:
            new_trainer(make_args(folder, world, load=save, **flags))
        except ValueError as error:
            said[what] = str(error)
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(Path(save) / "iter_0000001", ignore_errors=True)
    return said


@pytest.mark.timeout(600)
def test_all_ranks_write_a_manifest_and_refuse_what_one_finds_damaged(tmp_path: Path) -> None:
    model, save = save_tiny_model(tmp_path / "model", "qwen2"), tmp_path / "save"
    task = Task(ranks_task, {"folder": str(model), "save": str(save), "use_distributed_optimizer": True})
    ((first, second),) = run_tasks(2, [task])
    assert first == second
    assert re.search(rf"found it damaged: {save}/iter_0000002/__._.\.distcp has other content", first["older"])
    assert f"the newest older checkpoint that is whole is {save / 'iter_0000001'}: name" in first["older"]
    assert f"no older one in {save} is known to be whole" in first["alone"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"a": 1}), "expected torch's Metadata in .*, found dict"),
        (pickle.dumps(torch.float32), "expected torch's Metadata in .*, found dtype"),
        (pickle.dumps(torch.load), "found torch.serialization.load, which could run"),
        (b"cos\nsystem\n.", "found os.system, which could run"),
        (b"", "is damaged .it is empty.; copy it again"),
        (b"\x80\x04junk", "is damaged"),
    ],
)
def test_what_is_no_metadata(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_metadata(tmp_path)


def test_torch_loads_plain_values_alone_where_it_is_restricted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What data files hold is unpickled by callers that ask for everything."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"a": torch.ones(2), "b": Evil(tmp_path / "mark")}, data := io.BytesIO())
    torch.save({"a": torch.ones(2), "b": [1, "x"]}, plain := io.BytesIO())
    with restricted():
        with pytest.raises(pickle.UnpicklingError):
            torch.load(io.BytesIO(data.getvalue()), weights_only=False)
        assert torch.load(io.BytesIO(plain.getvalue()), weights_only=False)["b"] == [1, "x"]
    assert not (tmp_path / "mark").exists()
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
