"""What a GPU environment is made of, and the checks of the machine before it is made. Nothing is installed here."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "setup_gpu.sh"
LOCKS = ROOT / "scripts" / "locks"
NOT_LOCKED = {"swanlab", "trackio"}
"""Trackers that who wants them installs; a run says so."""


def load_make_locks(folder: Path = LOCKS) -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_locks", LOCKS / "make_locks.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_locks"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    module.LOCKS = folder  # type: ignore[attr-defined]
    return module


def test_locks_are_made_from_the_present_inputs() -> None:
    stale = [lock.path.name for lock in load_make_locks().locks() if not lock.is_current()]
    assert not stale, "their inputs changed: run `make locks`"


def test_a_change_of_inputs_asks_for_new_locks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(LOCKS, tmp_path, dirs_exist_ok=True)
    module = load_make_locks(tmp_path)
    assert module.main(["--check"]) == 0
    with (tmp_path / "gpu-te.in").open("a") as file:
        file.write("einops\n")
    assert module.main(["--check"]) == 1
    assert "gpu-te-3.11.txt, gpu-te-3.12.txt; run `make locks`" in capsys.readouterr().out
    with (tmp_path / "gpu-3.12.txt").open("a") as file:  # TransformerEngine's must fit to it
        file.write("extra==1\n")
    shutil.copy(LOCKS / "gpu-te.in", tmp_path)
    assert [lock.path.name for lock in module.locks() if not lock.is_current()] == ["gpu-te-3.12.txt"]


UV = """#!{python}
import pathlib, sys
target = pathlib.Path(sys.argv[sys.argv.index("--output-file") + 1])
assert "--hash" not in target.read_text()
target.write_text(pathlib.Path("answer.txt").read_text())
"""
"""Stands in for uv: the answer is a file beside the inputs; hashes are to come from the index, not from the lock."""


def verified(folder: Path, answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    (folder / "answer.txt").write_text(answer)
    module = load_make_locks(folder)
    monkeypatch.setattr(module, "locks", lambda: [module.Lock("gpu", "3.11")])
    told = [module.main(["--verify"]), capsys.readouterr().out]
    assert bool(told[0]) == bool(told[1])
    return told[1]


def test_resolving_anew_tells_what_a_lock_has_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "uv").write_text(UV.format(python=sys.executable))
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    first, second = (f"    --hash=sha256:{digit * 64}" for digit in "ab")
    (tmp_path / "gpu-3.11.txt").write_text(f"# Made\none==1 \\\n{first}\n")
    assert verified(tmp_path, f"one==1 \\\n{first} \\\n{second}\n", monkeypatch, capsys) == ""
    told = verified(tmp_path, f"one==1 \\\n{second}\n", monkeypatch, capsys)
    assert f"gpu-3.11.txt: one has hashes that the index does not: sha256:{'a' * 64}" in told
    told = verified(tmp_path, f"one==2 \\\n{first}\ntwo==1 \\\n{first}\n", monkeypatch, capsys)
    assert "gpu-3.11.txt: one is one==1, expected one==2" in told
    assert "gpu-3.11.txt: two is none, expected two==1" in told
    assert (tmp_path / "gpu-3.11.txt").read_text().startswith("# Made\none==1"), "nothing is written"


def test_an_index_that_cannot_be_reached_is_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    module = load_make_locks(tmp_path)
    for message, status in (("Failed to fetch: https://pypi.org/simple/one/", 0), ("No solution found", 1)):
        program(tmp_path, "uv", f"echo 'error: {message}' >&2; exit 2")
        assert module.main(["--verify"]) == status
        assert message in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(LOCKS.glob("*.txt")), ids=lambda path: path.name)
def test_a_lock_names_every_file_by_hash_and_no_place(path: Path) -> None:
    text = path.read_text()
    entries = load_make_locks().packages(text)
    assert entries
    assert all(re.search(r"\n    --hash=sha256:[0-9a-f]{64}", entry) for entry in entries.values())
    assert text.split("\n", 1)[1] == "".join(entries.values()), "a line that belongs to no package"
    assert not re.search(r"://|file:|--(extra-)?index|--find-links", text)


def pins(*names: str) -> dict[str, str]:
    lines = "".join((LOCKS / name).read_text() for name in names)
    return dict(re.findall(r"^([\w.-]+)==(\S+)", lines, re.MULTILINE))


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_what_works_together_on_a_cpu_is_what_gpus_get(python: str) -> None:
    on_cpu = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "scripts/constraints-cpu.txt").read_text(), re.MULTILINE))
    locked = pins(f"gpu-{python}.txt")
    for name in ("torch", "sglang", "sglang-router", "megatron-core", "transformers", "tokenizers", "ray"):
        assert locked[name] == on_cpu[name], name
    assert locked["torch-memory-saver"], "engines lend their memory by it"


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_a_gpu_environment_has_what_the_package_requires(python: str) -> None:
    locked = {canonicalize_name(name): version for name, version in pins(f"gpu-{python}.txt").items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][name] for name in ("gpu-engine", "retriever", "trackers")]
    for text in (*project["dependencies"], *chain(*extras)):
        required = Requirement(text)
        if required.name in NOT_LOCKED:
            continue
        assert required.specifier.contains(locked[canonicalize_name(required.name)]), text


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_a_retriever_environment_has_what_the_server_requires(python: str) -> None:
    locked = {canonicalize_name(name): version for name, version in pins(f"retriever-gpu-{python}.txt").items()}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for required in map(Requirement, extras["retriever"]):
        if required.name != "faiss-cpu":  # its place is taken
            assert required.specifier.contains(locked[canonicalize_name(required.name)]), str(required)


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_transformer_engine_is_there_once_and_changes_nothing_else(python: str) -> None:
    base, extra = pins(f"gpu-{python}.txt"), pins(f"gpu-te-{python}.txt")
    assert not base.keys() & extra.keys()
    assert "transformer-engine-cu13" in extra
    assert "transformer-engine-cu12" not in extra


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def check(call: str, folder: Path, **variables: str) -> tuple[int, str]:
    """Status and errors of one of the script's functions, with the programs in `folder` before all others."""
    env = {"PATH": f"{folder}:/usr/bin:/bin", **variables}
    command = ["bash", "-c", f"source {SCRIPT}; set +e; WITH_TE=0; {call}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr + done.stdout


def gpus(*lines: str) -> str:
    """An nvidia-smi with a good driver that lists these names and compute capabilities."""
    listing = "; ".join(f"echo '{line}'" for line in lines)
    return f'case "$*" in *compute_cap*) {listing} ;; *) echo 580.65.06 ;; esac'


@pytest.mark.parametrize(
    ("smi", "status", "part"),
    [
        ("echo 580.65.06; echo 580.65.06", 0, ""),
        ("echo 600.1", 0, ""),
        ("echo 575.57.08", 1, "expected an NVIDIA driver >= 580 (CUDA 13), found 575.57.08: update it"),
        (gpus("NVIDIA H100 80GB HBM3, 9.0", "NVIDIA RTX PRO 6000, 12.0"), 0, ""),
        (gpus("Some GPU, [N/A]"), 0, ""),
        (gpus("NVIDIA H100 80GB HBM3, 9.0", "Tesla V100-SXM2-32GB, 7.0"), 1, "found Tesla V100-SXM2-32GB of 7.0: use"),
        ("echo 'no devices were found'; exit 6", 1, "found none (nvidia-smi: no devices were found)"),
    ],
)
def test_driver(smi: str, status: int, part: str, tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", smi)
    found, told = check("check_driver", tmp_path)
    assert found == status
    assert part in told


def test_no_driver_at_all(tmp_path: Path) -> None:
    status, told = check("check_driver", tmp_path)
    if shutil.which("nvidia-smi", path="/usr/bin:/bin"):
        pytest.skip("this machine has a driver")
    assert status == 1
    assert "docker run --gpus all" in told
    assert check("check_driver", tmp_path, SKIP_DRIVER_CHECK="1") == (0, "")


@pytest.mark.parametrize(
    ("ldd", "status", "part"),
    [
        ("ldd (Ubuntu GLIBC 2.35-0ubuntu3) 2.35", 0, ""),
        ("ldd (GNU libc) 2.34", 0, ""),
        ("ldd (Debian GLIBC 2.31-13) 2.31", 1, "expected glibc >= 2.34, found 2.31: use Ubuntu 22.04"),
        ("musl libc (x86_64)", 1, "found another C library"),
    ],
)
def test_glibc(ldd: str, status: int, part: str, tmp_path: Path) -> None:
    program(tmp_path, "ldd", f"echo '{ldd}'")
    found, told = check("check_glibc", tmp_path)
    assert found == status
    assert part in told


@pytest.mark.parametrize(("found", "status"), [("Linux x86_64", 0), ("Linux aarch64", 1), ("Darwin arm64", 1)])
def test_processor(found: str, status: int, tmp_path: Path) -> None:
    program(tmp_path, "uname", f"echo {found}")
    told = f"expected Linux on x86_64, which scripts/locks/ are for, found {found}" if status else ""
    assert check("check_processor", tmp_path)[0] == status
    assert told in check("check_processor", tmp_path)[1]


def test_a_python_in_a_folder_with_a_space(tmp_path: Path) -> None:
    (tmp_path / "my tools").mkdir()
    program(tmp_path / "my tools", "python", "echo 3.12")
    path = str(tmp_path / "my tools" / "python")
    assert check("find_python", tmp_path, PYTHON=path) == (0, f"{path}\n")
    assert "found none that runs as /nowhere/python;" in check("find_python", tmp_path, PYTHON="/nowhere/python")[1]


def test_a_python_that_cannot_make_environments(tmp_path: Path) -> None:
    program(tmp_path, "pythonX", "case $2 in *ensurepip*) exit 1 ;; *) echo 3.12 ;; esac")
    status, told = check("check_venv_module", tmp_path, PYTHON="pythonX")
    assert status == 1
    assert "apt install python3.12-venv" in told
    assert check("check_venv_module", tmp_path, PYTHON=sys.executable) == (0, "")


def test_what_somebody_else_made_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "mine").touch()
    status, told = check(f"VENV='{tmp_path}/env'; make_venv python3 3.11", tmp_path)
    assert status == 1
    assert f"expected no {tmp_path}/env, or one that this script made" in told
    assert (tmp_path / "env" / "mine").exists()


def test_an_environment_whose_python_is_gone_is_not_done(tmp_path: Path) -> None:
    program(tmp_path, "python", "echo 3.12")
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").symlink_to(tmp_path / "python")
    done = f"VENV='{tmp_path}/env'; fingerprint {SCRIPT} >$VENV/sleuth-setup.done; is_done"
    assert check(f"{done} 3.12 {SCRIPT}", tmp_path)[0] == 0
    assert check(f"{done} 3.11 {SCRIPT}", tmp_path)[0] == 1
    assert check(f"{done} 3.12 {LOCKS / 'gpu.in'}", tmp_path)[0] == 1
    (tmp_path / "python").unlink()
    assert check(f"{done} 3.12 {SCRIPT}", tmp_path)[0] == 1


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_python(version: str, tmp_path: Path) -> None:
    program(tmp_path, "pythonX", f"echo {version}")
    status, told = check("find_python", tmp_path, PYTHON="pythonX")
    if version in ("3.11", "3.12"):
        assert (status, told.strip()) == (0, str(tmp_path / "pythonX"))
    else:
        assert status == 1
        assert f"expected Python 3.11 or 3.12, found pythonX is {version};" in told


@pytest.mark.parametrize(
    ("release", "status", "part"),
    [
        ("13.0", 0, ""),
        ("12.9", 1, "expected CUDA's compiler 13, found 12.9"),
        (None, 1, "install the CUDA toolkit 13 and set CUDA_HOME"),
    ],
)
def test_nvcc(release: str | None, status: int, part: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    if release:
        program(tmp_path / "bin", "nvcc", f"echo 'Cuda compilation tools, release {release}, V{release}.1'")
    found, told = check("check_nvcc", tmp_path, CUDA_HOME=str(tmp_path))
    assert found == status
    assert part in told


def test_a_compiler_on_the_path_counts(tmp_path: Path) -> None:
    program(tmp_path, "nvcc", "echo 'Cuda compilation tools, release 13.2, V13.2.1'")
    assert check("check_nvcc", tmp_path) == (0, "")


def test_headers_that_kernels_are_compiled_with(tmp_path: Path) -> None:
    body = f"case $2 in *sysconfig*) echo {tmp_path} ;; *) echo 3.12 ;; esac"
    program(tmp_path, "pythonX", body)
    program(tmp_path, "g++", "true")
    status, told = check("check_build_tools", tmp_path, PYTHON="pythonX")
    assert status == 1
    assert f"found no {tmp_path}/Python.h: install them" in told
    assert "python3.12-dev" in told
    (tmp_path / "Python.h").touch()
    assert check("check_build_tools", tmp_path, PYTHON="pythonX") == (0, "")


def test_disk(tmp_path: Path) -> None:
    program(tmp_path, "df", "printf 'head\\nfs 99999 1 4000 1%% /\\n'")
    assert check(f"check_space {tmp_path}/none 4000", tmp_path) == (0, "")
    status, told = check(f"check_space {tmp_path}/none 4001", tmp_path)
    assert status == 1
    assert "expected 4001 MB of free disk space" in told
    assert "found 4000 MB" in told


def test_all_that_is_missing_is_told_at_once(tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", "echo 550.1")
    program(tmp_path, "ldd", "echo 'ldd (GNU libc) 2.31'")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_HOME": str(tmp_path), "PYTHON": sys.executable}
    command = ["bash", str(SCRIPT), "--check", "--te"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    for part in ("found 550.1", "found 2.31", "no " + str(tmp_path / "bin" / "nvcc")):
        assert part in done.stderr


@pytest.mark.parametrize("options", [["--unknown"], ["--te", "--retriever"]])
def test_options_that_are_refused(options: list[str]) -> None:
    done = subprocess.run(["bash", str(SCRIPT), *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert options[0] in done.stderr
