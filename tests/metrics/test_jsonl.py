import json

import numpy as np
import pytest
import torch

from sleuth.metrics.jsonl import MetricsFile, read_metrics


def steps(path):
    return [line["step"] for line in read_metrics(path)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def write(path, numbers, first_step=1):
    file = MetricsFile(path, first_step=first_step)
    for step in numbers:
        file.write(step, {"loss": step / 10})
    file.close()


def test_a_line_a_step_readable_while_the_file_is_open(path):
    file = MetricsFile(path)
    file.write(0, {"eval/a/em": 0.1})
    file.write(1, {"loss": 0.5})
    assert steps(path) == [0, 1]
    file.close()


def test_numbers_that_json_lacks_are_null_and_tensors_are_numbers(path):
    file = MetricsFile(path)
    file.write(1, {"a": float("nan"), "b": float("inf"), "c": torch.tensor(2.5), "d": np.float32(0.5), "e": True})
    file.close()
    text = path.read_text()
    line = json.loads(text, parse_constant=lambda constant: pytest.fail(f"not JSON: {constant}"))
    assert (line["a"], line["b"], line["c"], line["d"], line["e"]) == (None, None, 2.5, 0.5, 1)


def test_parts_of_a_step_are_merged_into_one_line_also_after_opening_again(path):
    file = MetricsFile(path)
    file.write(1, {"loss": 0.123456789, "em": 1})
    file.write(1, {"loss": 1, "kl": 2})
    file.close()
    file = MetricsFile(path, first_step=2)
    file.write(1, {"time": 3})
    file.write(2, {})
    file.close()
    first, second = read_metrics(path)
    assert {name: first[name] for name in ("step", "loss", "em", "kl", "time")} == {
        "step": 1, "loss": 1, "em": 1, "kl": 2, "time": 3
    }  # fmt: skip
    assert second["step"] == 2


def test_an_earlier_step_is_refused(path):
    file = MetricsFile(path)
    file.write(3, {})
    with pytest.raises(ValueError, match="expected step 3 or later, found step 2"):
        file.write(2, {})
    file.close()


def test_resuming_cuts_the_steps_that_are_done_again_and_keeps_them_aside(path):
    write(path, [0, 1, 2, 3, 4])
    write(path, [3, 4, 5], first_step=3)
    assert steps(path) == [0, 1, 2, 3, 4, 5]
    assert steps(path.parent / "metrics.cut.jsonl") == [3, 4]


@pytest.mark.parametrize("keep_bytes", range(1, 12))
def test_a_torn_last_line_is_left_out_by_readers_and_repaired_by_the_next_run(path, keep_bytes):
    write(path, [1, 2])
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    path.write_bytes(whole[: start + keep_bytes])
    assert steps(path) == [1]
    write(path, [2, 3], first_step=2)
    assert steps(path) == [1, 2, 3]


def test_a_whole_last_line_without_its_newline_is_kept(path):
    write(path, [1, 2])
    path.write_bytes(path.read_bytes()[:-1])
    write(path, [3], first_step=3)
    assert steps(path) == [1, 2, 3]


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(path):
    write(path, [1, 2])
    path.write_text('{"step": "one"}\n' + path.read_text())
    with pytest.raises(ValueError, match="line 1: expected a JSON object with an integer step"):
        read_metrics(path)
