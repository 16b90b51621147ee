"""What is told before anything starts: data that do not fit, a disk that is too small."""

import shutil
from collections import namedtuple
from pathlib import Path

import pandas as pd
import pytest
from transformers import AutoModelForCausalLM

from sleuth.arguments import Args, parse_args
from sleuth.cluster.preflight import check_data, check_disk, check_precision, checkpoint_bytes, unwinnable_rows
from sleuth.hooks import hook_modules

DEMO = Path(__file__).parents[2] / "data/demo"
EVALUATION = ("--eval-interval", "20", "--eval-prompt-data", "demo")
Usage = namedtuple("Usage", "total used free")


def make_args(tmp_path: Path, *flags: str, data: str | Path = DEMO / "train.parquet") -> Args:
    hooks = "--custom-rm-path generate_with_search.reward_func"
    fixed = f"--hf-checkpoint {DEMO / 'model'} --colocate {hooks} --apply-chat-template --num-rollout 40"
    more = ["--prompt-data", str(data), "--save", str(tmp_path / "run/save"), "--save-interval", "10", *flags]
    return parse_args([*fixed.split(), *more])


def test_the_demos_data_fit(tmp_path: Path) -> None:
    check_data(make_args(tmp_path, *EVALUATION, f"{DEMO / 'test.parquet'}@[0:20]"))


def test_a_precision_that_this_cpu_lacks_is_told_with_its_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sleuth.dtypes.CPU_FLAGS_FOR_BFLOAT16", {"no such instructions"})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert check_precision(make_args(tmp_path)) is None
    for given in ("--dtype", "--sglang-dtype"):
        warning = check_precision(make_args(tmp_path, given, "bfloat16"))
        assert str(warning).startswith(f"{given}: bfloat16 is about ten times slower")


def test_data_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    rows = pd.read_parquet(DEMO / "test.parquet").drop(columns=["reward_model"])
    rows.to_parquet(bare := tmp_path / "bare.parquet")
    (broken := tmp_path / "broken.parquet").write_text("no parquet")
    for data, message in ((bare, "column 'reward_model'"), (broken, "expected a parquet file, found none")):
        with pytest.raises(ValueError, match=message):
            check_data(make_args(tmp_path, data=data))
        with pytest.raises(ValueError, match=message):
            check_data(make_args(tmp_path, *EVALUATION, str(data)))


def test_arguments_of_the_renderer_are_told_with_their_flag(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--apply-chat-template-kwargs: .* found tokenize"):
        check_data(make_args(tmp_path, "--apply-chat-template-kwargs", '{"tokenize": true}'))


def test_the_first_supervised_trajectories_are_looked_at(tmp_path: Path) -> None:
    (data := tmp_path / "rows.jsonl").write_text('{"segments": [{"text": "a b", "weight": 1}]}\n' * 16 + "no JSON\n")
    supervised = ("--loss-type", "sft")
    check_data(make_args(tmp_path, *supervised, data=data))
    data.write_text('{"segments": [{"text": "a\\ud835", "weight": 1}]}')
    with pytest.raises(ValueError, match=r"row 0 of .*rows.jsonl, column 'segments'"):
        check_data(make_args(tmp_path, *supervised, data=data))


def test_a_vocabulary_that_is_too_small_is_told(tmp_path: Path) -> None:
    shutil.copytree(DEMO / "model", model := tmp_path / "model")
    config = model / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 4096', '"vocab_size": 100'))
    with pytest.raises(ValueError, match="expected ids below the model's vocab_size 100"):
        check_data(make_args(tmp_path, "--hf-checkpoint", str(model)))


def test_the_size_of_a_checkpoint(tmp_path: Path) -> None:
    parameters = AutoModelForCausalLM.from_pretrained(DEMO / "model").num_parameters()
    assert checkpoint_bytes(make_args(tmp_path, "--dtype", "float32")) == 12 * parameters
    assert checkpoint_bytes(make_args(tmp_path, "--dtype", "bfloat16")) == 14 * parameters


@pytest.mark.parametrize(
    ("room", "flags", "told"), [(4, [], None), (3.5, [], "4 checkpoints"), (3.5, ["--save-keep", "2"], None)]
)
def test_room_for_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: float, flags: list[str], told: str | None
) -> None:
    args = make_args(tmp_path, *flags)
    free = int(room * checkpoint_bytes(args))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(free, 0, free))
    warning = check_disk(args)
    assert (warning is None) == (told is None)
    assert (told or "") in (warning or "")


def test_no_room_at_all_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, 1_000_000))
    with pytest.raises(ValueError, match=rf"--save: expected room .* 0.03 GB; {tmp_path} has 0.00 GB free; make room"):
        check_disk(make_args(tmp_path))


def test_labels_are_read_as_the_reward_reads_them(tmp_path: Path) -> None:
    rows = pd.read_parquet(DEMO / "test.parquet").head(4)
    rows["reward_model"] = ["['Paris', 'Rome']", "[]", '{"value": "Paris", "aliases": []}', None]
    rows.to_parquet(path := tmp_path / "rows.parquet")
    args = make_args(tmp_path, data=path)
    (sentence,) = unwinnable_rows(args, hook_modules(args))
    assert "2 of 4 rows have no accepted answer in the column 'reward_model'" in sentence
    assert "(rows 1, 3)" in sentence
    rows["reward_model"] = ["a", "b", "c", "d"]
    rows["reward_model"] = [{"nonsense": value} for value in rows["reward_model"]]
    rows.to_parquet(path)
    with pytest.raises(ValueError, match=r"row 0 of .*rows.parquet, column 'reward_model' \(--label-key\): .*nonsense"):
        unwinnable_rows(args, hook_modules(args))
