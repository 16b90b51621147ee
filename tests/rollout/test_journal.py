"""The journal gives back exactly what was written, whatever a kill or a disk did to its end."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sleuth.arguments import parse_args
from sleuth.checkpoints import TRACKER
from sleuth.rollout.journal import Journal, differing, read_step, step_file, step_files
from sleuth.rollout.journal_settings import journal_settings
from sleuth.sample import Sample, SampleStatus, StopReason, TokenTrace
from tests.rollout.test_manager import DEMO

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"lr": 0.1, "custom_config": {"search_r1": {"topk": 1}}}


def finished(group: int, index: int, ids: tuple[int, ...] = (5, 6), log_prob: float = -0.1) -> Sample:
    sample = fresh(group, index)
    sample.trace.append_model(ids, [log_prob] * len(ids))
    sample.trace.append_observation([7, 8])
    sample.report(turns=2, query="who?")
    sample.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)
    sample.set_reward({"reward": 0.3, "exact_match": 1.0})
    return sample


def fresh(group: int, index: int) -> Sample:
    return Sample(
        index, group, "who?", TokenTrace([1, 2, 3 + group]), label=["x"], metadata={"k": 1}, file="f", row=group
    )


def written(folder: Path, samples: list[Sample], step: int = 3, settings: dict[str, Any] = SETTINGS) -> Path:
    """The file of a step that was not finished."""
    journal = Journal(folder, None, settings).step(step)
    for sample in samples:
        asyncio.run(journal.record(sample))
    return step_file(folder / "journal", step)


def resumed(folder: Path, step: int = 3, settings: dict[str, Any] = SETTINGS) -> Any:
    journal = Journal(folder, folder, settings)
    journal.start()
    return journal.step(step)


def test_samples_come_back_as_they_were_and_each_once(tmp_path: Path) -> None:
    samples = [finished(0, 0), finished(0, 1), finished(1, 2)]
    written(tmp_path, samples)
    journal = resumed(tmp_path)
    for sample in samples:
        assert journal.take(fresh(sample.group_index, sample.index)) == sample
        assert journal.take(fresh(sample.group_index, sample.index)) is None
    assert journal.take(fresh(1, 3)) is None
    assert journal.taken == 3
    asyncio.run(journal.record(finished(1, 3)))
    journal.finish([[finished(1, 2)], [finished(0, 0)]], {"stream": {"epoch": 0}})
    record = read_step(journal.path)
    assert record is not None
    assert sorted(record.samples) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert [[sample.index for sample in group] for group in record.groups] == [[2, 3], [0, 1]]
    assert record.state == {"stream": {"epoch": 0}}


@given(st.lists(st.floats(max_value=0.0, allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_log_probabilities_are_exact(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    folder = tmp_path_factory.mktemp("journal")
    sample = fresh(0, 0)
    sample.trace.append_model(list(range(len(values))), values)
    sample.finish(SampleStatus.TRUNCATED, "reason_of_mine").set_reward(1e300)
    written(folder, [sample])
    assert resumed(folder).take(fresh(0, 0)) == sample


def test_a_file_that_ends_anywhere_gives_all_whole_records_and_goes_on(tmp_path: Path) -> None:
    path = written(tmp_path, [finished(0, i) for i in range(4)])
    data = path.read_bytes()
    counts = []
    for end in range(len(data) + 1):
        path.write_bytes(data[:end])
        record = read_step(path)
        counts.append(-1 if record is None else len(record.samples))
    assert counts == sorted(counts)
    assert set(counts) == {-1, 0, 1, 2, 3, 4}
    path.write_bytes(data[:-1])
    journal = resumed(tmp_path)
    assert [journal.take(fresh(0, i)) is not None for i in range(4)] == [True, True, True, False]
    asyncio.run(journal.record(finished(0, 3)))
    record = read_step(path)
    assert record is not None
    assert len(record.samples) == 4  # nothing torn is left in the middle


def test_a_flipped_byte_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, [finished(0, i) for i in range(4)])
    data = bytearray(path.read_bytes())
    whole = read_step(path)
    for position in range(len(data) // 2, len(data), 7):
        data[position] ^= 1
        path.write_bytes(data)
        record = read_step(path)
        data[position] ^= 1
        assert record is not None
        assert whole is not None
        assert all(sample == whole.samples[key] for key, sample in record.samples.items())
    assert "is damaged, and is dropped" in caplog.text


def test_zcat_reads_it(tmp_path: Path) -> None:
    path = written(tmp_path, [finished(0, 0)])
    lines = subprocess.run(["zcat", path], capture_output=True, check=True, text=True).stdout.splitlines()
    assert [json.loads(line).get("step") for line in lines] == [3, None]


def test_samples_of_other_settings_are_generated_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path, [finished(0, 0)])
    with caplog.at_level(logging.WARNING):
        journal = resumed(tmp_path, settings=SETTINGS | {"lr": 0.2})
    assert journal.take(fresh(0, 0)) is None
    assert "other settings (lr 0.1 instead of 0.2)" in caplog.text


def test_a_sample_of_another_prompt_is_not_taken(tmp_path: Path) -> None:
    written(tmp_path, [finished(0, 0)])
    other = fresh(0, 0)
    other.trace.prompt_ids[0] = 9
    assert resumed(tmp_path).take(other) is None


def test_a_new_run_clears_the_journal_and_a_resumed_one_keeps_it(tmp_path: Path) -> None:
    path = written(tmp_path, [finished(0, 0)])
    resumed(tmp_path)
    assert path.exists()
    Journal(tmp_path, None, SETTINGS).start()
    assert not path.exists()


def test_files_go_with_the_checkpoints(tmp_path: Path) -> None:
    for step in range(1, 6):
        written(tmp_path, [], step)
    for step in (2, 4):
        (tmp_path / f"iter_{step:07d}").mkdir()
        (tmp_path / f"iter_{step:07d}/metadata.json").touch()
    Journal(tmp_path, None, SETTINGS).step(6)
    assert list(step_files(tmp_path / "journal")) == [1, 2, 3, 4, 5, 6]  # a run would start at step 1
    (tmp_path / TRACKER).write_text("4")
    Journal(tmp_path, None, SETTINGS).step(6)
    assert list(step_files(tmp_path / "journal")) == [3, 4, 5, 6]
    (tmp_path / "iter_0000002/metadata.json").unlink()
    Journal(tmp_path, None, SETTINGS, keep_all=True).step(7)
    assert list(step_files(tmp_path / "journal")) == [3, 4, 5, 6, 7]


def test_a_disk_that_is_full_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path, None, SETTINGS).step(1)
    journal.path.unlink()
    journal.path.symlink_to("/dev/full")
    asyncio.run(journal.record(finished(0, 0)))
    asyncio.run(journal.record(finished(0, 1)))
    assert caplog.text.count("cannot be written") == 1
    assert "No space left on device" in caplog.text


def test_settings_tell_runs_apart_but_not_addresses(tmp_path: Path) -> None:
    def settings(*flags: str, url: str = "http://a:1/retrieve", topk: int = 1) -> dict[str, Any]:
        config = tmp_path / "search.yaml"
        config.write_text(f"search_r1: {{local: {{search_url: '{url}'}}, topk: {topk}}}\n")
        data = ["--hf-checkpoint", str(DEMO / "model"), "--prompt-data", str(DEMO / "train.parquet"), "--colocate"]
        hooks = ["--custom-generate-function-path", "generate_with_search.generate"]
        reward = ["--custom-rm-path", "generate_with_search.reward_func", "--custom-config-path", str(config)]
        return journal_settings(parse_args([*data, *hooks, *reward, *flags]))

    first = settings()
    assert json.loads(json.dumps(first)) == first
    assert settings("--save", str(tmp_path), "--run-dir", str(tmp_path), url="http://b:2/retrieve") == first
    assert settings("--max-failure-rate", "0.5", "--tensor-model-parallel-size", "1") == first
    assert differing(first, settings("--lr", "0.5"))[0].endswith("instead of 0.5")
    assert differing(first, settings(topk=2))[0].startswith("custom_config")
    assert first["hooks"].keys() == {"generate_with_search"}


def test_a_kill_at_any_moment_loses_no_sample_and_uses_none_twice(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.rollout.journal_kills", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    expected = {
        *("beginning a step: before os.mkdir", "beginning a step: half written", "beginning a step: written"),
        *("beginning a step: before os.rename", "beginning a step: before os.remove"),
        *("a sample: before a write", "a sample: half written", "a sample: written"),
        *("the end of a step: before a write", "the end of a step: half written", "the end of a step: written"),
        *("training: trained", "saving: before os.rename"),
    }
    assert expected <= result["moments"].keys()
    assert result["runs"] > 60
