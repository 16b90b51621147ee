"""Memory of processes is the real one; that of GPUs comes from a stand-in of nvidia-smi."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sleuth.metrics.memory import gpu_memory, process_memory


def test_a_process_that_takes_more_shows_more() -> None:
    before = process_memory("driver")["perf/memory/driver"]
    held = bytearray(200_000_000)
    held[::4096] = b"x" * len(held[::4096])
    assert process_memory("driver")["perf/memory/driver"] - before == pytest.approx(0.2, abs=0.05)


def test_processes_count_together_and_those_that_ended_not_at_all() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    processes = [psutil.Process(), psutil.Process(child.pid)]
    both = process_memory("engine_0", processes)["perf/memory/engine_0"]
    child.communicate(b"\n")
    assert 0 < process_memory("engine_0", processes)["perf/memory/engine_0"] < both
    assert process_memory("engine_0", []) == {"perf/memory/engine_0": 0.0}


def test_gpus_are_asked_by_their_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory("engine_0", []) == gpu_memory("engine_0", ["0"]) == {}  # no GPU, and no nvidia-smi
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho $* > {tmp_path}/asked\nprintf '1000\\n500\\n'\n")
    tool.chmod(0o755)
    assert gpu_memory("engine_0", ["2", "3"]) == {"perf/gpu_memory/engine_0": pytest.approx(1.572864)}
    assert (tmp_path / "asked").read_text().split()[-2:] == ["-i", "2,3"]
    tool.write_text("#!/bin/sh\necho no devices; exit 6\n")
    assert gpu_memory("engine_0", ["0"]) == {}
