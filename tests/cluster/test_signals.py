"""What a run does on signals, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, time
from sleuth.cluster.signals import end_on_signals
end_on_signals()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
for number in ({first}, {second}):
    os.kill(os.getpid(), number)
try:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
    time.sleep(10)
except KeyboardInterrupt:
    os.kill(os.getpid(), {second})
    print("interrupted once")
"""

HELD = """
import os, signal, sys, time
from sleuth.cluster import signals
signals.PATIENCE_SECONDS, signals.TOGETHER_SECONDS = {patience}, 0.2
interruption = signals.end_on_signals()
done = []

def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)
    done.append("worked")

try:
    with interruption.held("saving step 5"):
        for pause in {pauses}:
            work(pause)
            os.kill(os.getpid(), signal.SIGTERM)
        work({rest})
    done.append("not interrupted")
except KeyboardInterrupt:
    done.append("interrupted")
if {again}:
    try:
        with interruption.held("the second"):
            work({again})
        done.append("whole")
    except KeyboardInterrupt:
        done.append("cut short")
print(*done, interruption.gave_up, sep=", ")
"""


def run(script: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("first", "second"), [(2, 15), (15, 2), (2, 2)])
def test_signals_that_come_together_interrupt_once(first: int, second: int):
    assert run(SCRIPT.format(first=first, second=second)) == (0, "interrupted once\n", "")


@pytest.mark.parametrize(
    ("pauses", "rest", "patience", "again", "told"),
    [
        pytest.param([], 0, 9, 0, "worked, not interrupted, False", id="no signal"),
        pytest.param([0], 0.3, 9, 0, "worked, worked, interrupted, False", id="what is held ends first"),
        pytest.param([0, 0], 0.3, 9, 0, "worked, worked, worked, interrupted, False", id="two at once are one"),
        pytest.param([0, 0.3], 9, 9, 0, "worked, worked, interrupted, True", id="a second one ends it"),
        pytest.param([0], 9, 0.3, 0, "worked, interrupted, True", id="patience ends"),
        pytest.param([0], 0.1, 9, 0.2, "worked, worked, interrupted, worked, whole, False", id="and a save after it"),
        pytest.param([0], 0.1, 0.5, 9, "worked, worked, interrupted, cut short, True", id="patience is one for both"),
    ],
)
def test_what_is_held_ends_before_the_interruption(
    pauses: list[float], rest: float, patience: float, again: float, told: str
):
    code, output, errors = run(HELD.format(pauses=pauses, rest=rest, patience=patience, again=again))
    assert (code, output) == (0, told + "\n"), errors
    assert ("interrupted: saving step 5 (" in errors) == bool(pauses)
    assert "Traceback" not in errors
