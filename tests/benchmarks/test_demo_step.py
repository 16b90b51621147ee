"""The profile of the demo's steps: phases from a run's records, processor time from samples."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from benchmarks.demo_step import KINDS, OTHERS, REST, Usage, Watch, kind_of, phases, summary, table

STEPS = [
    {"step": 0, "timestamp": 100.0},
    {"step": 1, "timestamp": 110.0, "time/rollout": 6.0, "time/train": 3.0, "time/sync": 0.5, "time/step": 10.0},
    {
        "step": 2,
        "timestamp": 125.0,
        "time/rollout": 4.0,
        "time/train": 2.0,
        "time/sync": 0.5,
        "time/step": 7.0,
        "time/evaluation": 6.0,
        "time/save": 2.0,
    },
]


def usage(start: float = 90.0, end: float = 130.0) -> Usage:
    """The engine's model is busy throughout, the trainer from second 110 on; a sample every second."""
    times = [start + i for i in range(int(end - start) + 1)]
    kinds = [*KINDS.values(), REST, OTHERS]
    busy = [dict.fromkeys(kinds, 0.0) | {"engine: model": t - start, "trainer": max(0.0, 2 * (t - 110))} for t in times]
    return Usage(times, busy)


def test_phases_follow_each_other() -> None:
    found = phases(STEPS)
    assert found[0] == ("evaluation", 117.0, 123.0)
    assert found[1:] == [
        ("rollout", 110.0, 114.0),
        ("train", 114.0, 116.0),
        ("sync", 116.0, 116.5),
        ("rest of the step", 116.5, 117.0),
    ]


def test_processor_time_is_that_of_the_phase() -> None:
    rows = summary(STEPS, 90.0, usage())
    assert list(rows) == [
        "start, first evaluation",
        "rollout",
        "train",
        "sync",
        "rest of the step",
        "a step",
        "evaluation",
    ]
    assert rows["rollout"]["engine: model"] == pytest.approx(4.0)
    assert rows["train"]["trainer"] == pytest.approx(4.0)
    assert rows["sync"]["trainer"] == pytest.approx(1.0), "between two samples"
    assert rows["a step"]["seconds"] == pytest.approx(7.0)
    assert rows["start, first evaluation"]["seconds"] == pytest.approx(10.0)
    assert rows["start, first evaluation"]["trainer"] == 0
    lines = table(rows).splitlines()
    assert lines[3].startswith("| rollout | 4.00 | 4.00 |")
    assert len({line.count("|") for line in lines}) == 1


def test_a_process_is_known_by_its_command_line() -> None:
    assert kind_of("python -m sleuth.engine.launch 1 /tmp/x --port 1") == "engine: HTTP"
    assert kind_of("ray::RolloutActor.generate") == "rollout"
    assert kind_of("python train.py") == REST


def test_what_a_process_and_its_children_use_is_seen() -> None:
    """A child, named as the trainer is, counts for 0.5 s: half of that at least is seen, however busy the machine."""
    child = "import time\nwhile time.process_time() < 0.5: pass\ntime.sleep(1.5)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, 'ray::TrainActor'])"
    with subprocess.Popen([sys.executable, "-c", parent]) as process:
        watch = Watch(process, interval=0.05)
        assert watch.run() == 0
    found = watch.usage.between(0.0, time.time())
    assert 0.25 < found["trainer"] < 2.0
