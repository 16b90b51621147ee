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


@pytest.mark.parametrize(("first", "second"), [(2, 15), (15, 2), (2, 2)])
def test_signals_that_come_together_interrupt_once(first: int, second: int):
    command = [sys.executable, "-c", SCRIPT.format(first=first, second=second)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted once\n", "")
