"""What the doctor says of machines: this one, and ones that lack something."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sleuth.doctor import machine
from sleuth.doctor.findings import Finding, Verdict, findings_of, ok

ROOT = Path(__file__).resolve().parents[2]


def told(*findings: Finding) -> str:
    return "\n".join(map(str, findings))


def test_this_machine_has_a_line_for_every_check() -> None:
    found = list(findings_of(machine.machine_checks()))
    assert {finding.what for finding in found} == {name for name, _ in machine.machine_checks()}
    assert "the check itself failed" not in told(*found)


def test_packages_are_compared_with_the_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    file, pinned = machine.pins()
    assert (ROOT / file).is_file()
    assert set(machine.CORE) <= set(pinned)
    monkeypatch.setattr(machine, "pins", lambda: ("pins.txt", {"torch": "1.0", "not-there": "2.0"}))
    monkeypatch.setattr(machine, "CORE", ("torch", "not-there"))
    missing, other = machine.packages()
    assert (missing.verdict, other.verdict) == (Verdict.WRONG, Verdict.NOTE)
    assert "expected not-there, found none; run `bash scripts/setup_cpu.sh`" in missing.text
    assert re.search(r"the versions of pins.txt, .* found torch \d.* instead of 1.0; run the set-up again", other.text)


@pytest.mark.parametrize(
    ("listing", "verdict", "text"),
    [
        ("", Verdict.OK, "nvidia-smi finds none"),
        ("NVIDIA H100, 535.54.03\n", Verdict.WRONG, "expected an NVIDIA driver >= 580, found 1 of NVIDIA H100"),
        ("NVIDIA H100, 580.65.06\n" * 2, Verdict.NOTE, "2 of NVIDIA H100, driver 580.65.06, but torch"),
        ("No devices were found, at all\n", Verdict.OK, "finds none"),
    ],
)
def test_gpus(monkeypatch: pytest.MonkeyPatch, listing: str, verdict: Verdict, text: str) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, listing))
    (found,) = machine.gpus()
    assert found.verdict is verdict
    assert text in found.text


def test_the_driver_is_the_one_that_the_set_up_needs() -> None:
    script = (ROOT / "scripts/setup_gpu.sh").read_text()
    assert f"NEEDED_DRIVER={machine.NEEDED_DRIVER} " in script


def test_little_room_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage: Any = shutil.disk_usage(tmp_path)._replace(total=67_108_864, free=67_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    found = list(machine.shared_memory(tmp_path)) + list(machine.disk())
    assert [finding.verdict for finding in found] == [Verdict.NOTE] * 3
    assert "--shm-size=8g" in found[0].text
    (none,) = machine.shared_memory(tmp_path / "none")
    assert none.verdict is Verdict.WRONG


def test_a_containers_memory_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("2000000000\n")
    (found,) = machine.memory(tmp_path)
    assert found.verdict is Verdict.NOTE
    assert "of which this container may use 2.0 GB" in found.text
    (tmp_path / "memory.max").write_text("max\n")
    assert "container" not in told(*machine.memory(tmp_path))


def test_tight_limits_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (256 if kind == resource.RLIMIT_NOFILE else resource.RLIM_INFINITY, 0)
    )
    (found,) = machine.limits()
    assert str(found) == (
        "note   limits: open files (ulimit -n): expected at least 4096, found 256; `ulimit -n 65536` before the run"
    )


@pytest.mark.parametrize(
    ("environment", "verdict", "text"),
    [
        ({}, Verdict.OK, "no Slurm or CI job"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "8200"}, Verdict.OK, "the Slurm job 7 ends in 120 minutes"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1600"}, Verdict.NOTE, "the Slurm job 7 ends in 10 minutes"),
        ({"SLURM_JOB_ID": "7"}, Verdict.NOTE, "the Slurm job 7 does not say when it ends"),
        ({"GITLAB_CI": "true", "CI": "true", "CI_JOB_TIMEOUT": "3000"}, Verdict.NOTE, "ends in 50 minutes"),
        ({"GITHUB_ACTIONS": "true", "CI": "true"}, Verdict.NOTE, "the GitHub job does not say"),
        ({"CI": "1"}, Verdict.NOTE, "the CI job does not say"),
    ],
)
def test_when_a_job_ends(environment: dict[str, str], verdict: Verdict, text: str) -> None:
    (found,) = machine.time_limit(environment, now=1000.0)
    assert found.verdict is verdict
    assert text in found.text


def test_a_check_that_fails_is_told_and_the_others_go_on() -> None:
    def missing() -> list[Finding]:
        raise FileNotFoundError("expected\n  a file")

    def broken() -> list[Finding]:
        raise KeyError("x")

    found = list(findings_of([("a", missing), ("b", broken), ("c", lambda: [ok("c", "well")])]))
    assert told(*found).splitlines() == [
        "wrong  a: expected a file",
        "wrong  b: the check itself failed: KeyError: 'x'",
        "ok     c: well",
    ]
