"""SGLang's own options: from command lines and files to an engine's command line, and what SGLang says to them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sleuth.arguments import Args, config_table, parse_args
from sleuth.arguments.sglang_flags import SET_HERE, take_options
from sleuth.cluster.engines import engine_config
from sleuth.cluster.placement import Device
from sleuth.cluster.preflight import check_sglang_options
from sleuth.engine import option_check
from sleuth.engine.option_check import NoSglangError, check_options, find_problems
from sleuth.engine.option_names import option, option_words
from sleuth.engine.server import EngineConfig, server_args, server_environment
from tests.flags import error_of, parse, write

FLAGS = ["--sglang-cuda-graph-max-bs", "128", "--sglang-enable-torch-compile", "--sglang-schedule-policy=lpm"]
FLAGS += ["--sglang-preferred-sampling-params", '{"top_k": 5}', "--sglang-bucket-time-to-first-token", "0.1", "1", "5"]
OPTIONS = {
    "cuda_graph_max_bs": ["128"],
    "enable_torch_compile": [],
    "schedule_policy": ["lpm"],
    "preferred_sampling_params": ['{"top_k": 5}'],
    "bucket_time_to_first_token": ["0.1", "1", "5"],
}


def test_options_reach_an_engine_as_they_were_given() -> None:
    args = parse("--seed", "3", *FLAGS, "--lr", "1e-5")
    assert args.sglang_options == OPTIONS
    assert (args.seed, args.lr) == (3, 1e-5)
    command = server_args(engine_config(args, Path("run"), 0, [Device(0, "127.0.0.1", None)]), 1234, on_gpu=False)
    assert command[-len(option_words(OPTIONS)) :] == list(option_words(OPTIONS))
    assert option_words(OPTIONS)[:4] == ("--cuda-graph-max-bs", "128", "--enable-torch-compile", "--schedule-policy")


def test_flags_with_types_stay_what_they_were() -> None:
    args = parse("--sglang-mem-fraction-static", "0.5", "--sglang-dtype=float32", "--sglang-max-total-tokens", "99")
    assert (args.sglang_mem_fraction_static, args.sglang_dtype, args.sglang_max_total_tokens) == (0.5, "float32", 99)
    assert args.sglang_options == {}
    assert "sglang_options" not in args.to_dict()


@pytest.mark.parametrize(("flags", "threads"), [([], "1"), (["--cpu-threads-per-engine", "2"], "2")])
def test_an_engine_on_a_cpu_gets_its_threads(flags: list[str], threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # what the caller has
    config = engine_config(parse(*flags), Path("run"), 0, [Device(0, "127.0.0.1", None)])
    assert server_environment(config, Path("x"), on_gpu=False)["OMP_NUM_THREADS"] == threads


def test_options_in_files_and_on_the_command_line(tmp_path: Path) -> None:
    text = "sglang_cuda-graph-max-bs: 64\nsglang_schedule_policy: fcfs\nsglang_enable_torch_compile: true\n"
    text += "sglang_bucket_time_to_first_token: [0.1, 1, 5]\nsglang_preferred_sampling_params: {top_k: 5}\n"
    args = parse("--custom-config-path", write(tmp_path / "c.yaml", text), *FLAGS[:2], FLAGS[3])
    assert args.sglang_options == OPTIONS
    args.write(tmp_path / "resolved.yaml")
    assert parse_args(["--custom-config-path", str(tmp_path / "resolved.yaml")]).sglang_options == OPTIONS


@pytest.mark.parametrize("value", ["false", "null"])
def test_a_file_cannot_take_an_option_back(value: str, tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", f"sglang_enable_torch_compile: {value}\n")
    message = error_of("--custom-config-path", path)
    assert f"sglang_enable_torch_compile: expected a value or true, found {value}; leave it out" in message


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (
            ["--sglang-port", "3000"],
            "--sglang-port follows from the rest of a run: every engine listens on a free port",
        ),
        (["--sglang-model-path", "x"], "--sglang-model-path follows from the rest of a run: use --hf-checkpoint"),
        (["--sglang-tensor-parallel-size=2"], "use --rollout-num-gpus-per-engine"),
        (["--sglang-base-gpu-id", "4"], "every engine sees only its own GPUs"),
        (["--sglang-server-concurrency", "64"], "did you mean --rollout-max-concurrency?"),
        (["--sglang-tp-size", "2"], "did you mean --rollout-num-gpus-per-engine?"),
        (["--sglang-mem-fraction-static", "2"], "--sglang-mem-fraction-static: expected less than or equal to 1"),
        (["--sglang-options", "x"], "--sglang-options: unknown"),
    ],
)
def test_options_that_a_run_sets_itself(flags: list[str], part: str) -> None:
    assert part in error_of(*flags)


def test_a_clash_in_a_file_is_told_as_well(tmp_path: Path) -> None:
    assert "use --seed" in error_of("--custom-config-path", write(tmp_path / "c.yaml", "sglang_random_seed: 3\n"))


def test_the_last_of_two_counts_and_words_end_at_a_flag() -> None:
    options, others = take_options(["a", "--sglang-x", "1", "--y", "2", "--sglang-x", "-3", "--sglang-z"], known=set())
    assert options == {"x": ["-3"], "z": []}
    assert others == ["a", "--y", "2"]


def test_the_table_shows_options(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    Console(width=120).print(config_table(parse(*FLAGS), only_changed=True))
    shown = capsys.readouterr().out
    assert "--sglang-cuda-graph-max-bs" in shown
    assert "0.1 1 5" in shown
    assert "--sglang-options" not in shown


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message)


def test_what_a_parser_says_is_told_for_each_option() -> None:
    parser = Parser(allow_abbrev=False)
    parser.add_argument("--model-path")
    parser.add_argument("--schedule-policy", choices=["lpm", "fcfs"])
    parser.add_argument("--cuda-graph-max-bs", type=int)
    parser.add_argument("--enable-torch-compile", action="store_true")
    options = {"schedule_polcy": ["lpm"], "xyzzyq": [], "cuda_graph_max_bs": ["many"], "enable_torch_compile": ["yes"]}
    assert list(find_problems(options | {"schedule_policy": ["lpm"]}, parser)) == [
        "--sglang-schedule-polcy: SGLang has no option --schedule-polcy; did you mean --sglang-schedule-policy?",
        "--sglang-xyzzyq: SGLang has no option --xyzzyq; see python -m sglang.launch_server --help",
        "--sglang-cuda-graph-max-bs: SGLang says: argument --cuda-graph-max-bs: invalid int value: 'many'",
        "--sglang-enable-torch-compile: SGLang says: unrecognized arguments: yes",
    ]


def test_what_was_found_good_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []
    answers: list[list[str]] = [["--sglang-x: SGLang has no option --x"], []]
    monkeypatch.setattr(option_check, "_ask", lambda options: asked.append(options) or answers.pop(0))
    monkeypatch.setattr(option_check, "version", lambda name: "0.5.21")
    with pytest.raises(ValueError, match=r"SGLang 0\.5\.21 has no option --x"):
        check_options({"x": []})
    check_options({"x": []})
    check_options({"x": []})
    check_options({})
    assert len(asked) == 2


def test_where_there_is_no_sglang_only_a_plan_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise option_check.PackageNotFoundError(name)

    monkeypatch.setattr(option_check, "version", version)
    args, notes = parse("--sglang-x-y", "1"), list[str]()
    check_sglang_options(args, planning=True, warn=notes.append)
    assert "--sglang-x-y: expected SGLang, to check them, found none" in notes[0]
    with pytest.raises(NoSglangError):
        check_sglang_options(args, planning=False, warn=notes.append)


ASK = """
import json, sys
from sleuth.engine.option_check import find_problems, sglang_parser
parser = sglang_parser()
names = {}
for name, action in parser._option_string_actions.items():
    names.setdefault(action.dest, []).append(name)
print(json.dumps([list(find_problems(json.loads(sys.argv[1]), parser)), names]))
"""


@pytest.fixture(scope="module")
def sglang() -> tuple[list[str], dict[str, list[str]]]:
    """What SGLang itself says to some options, and all of its options by what they set."""
    if find_spec("sglang") is None:
        pytest.skip("there is no SGLang")
    options = OPTIONS | {"attention_backend": ["fa"], "chunked_prefil_size": ["1"], "cuda_graph_max_bs": ["x"]}
    env = server_environment(EngineConfig(""), Path("/tmp"), on_gpu=False)
    command = [sys.executable, "-c", ASK, json.dumps(options)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def test_sglang_tells_what_it_does_not_take(sglang: tuple[list[str], dict[str, list[str]]]) -> None:
    told = {problem.split(":")[0]: problem for problem in sglang[0]}
    assert "did you mean --sglang-chunked-prefill-size?" in told["--sglang-chunked-prefil-size"]
    assert "invalid choice: 'fa' (choose from" in told["--sglang-attention-backend"]
    assert set(told) == {"--sglang-chunked-prefil-size", "--sglang-attention-backend", "--sglang-cuda-graph-max-bs"}


def test_what_is_set_here_is_set_by_those_names(sglang: tuple[list[str], dict[str, list[str]]]) -> None:
    names = sglang[1]
    spellings = [set(spelled) for spelled in names.values()]
    for name in SET_HERE:
        (same,) = [group for group in spellings if option(name) in group]
        assert {spelling[2:].replace("-", "_") for spelling in same} <= SET_HERE.keys(), name


def test_every_option_that_an_engine_is_started_with_is_set_here_or_may_be_changed() -> None:
    config = EngineConfig("model", context_length=9, mem_fraction_static=0.7, enable_memory_saver=True)
    started = {word[2:].replace("-", "_") for word in server_args(config, 1, on_gpu=True) if word.startswith("--")}
    typed = {"dtype", "mem_fraction_static", "max_total_tokens"}
    assert started - SET_HERE.keys() - typed == {"log_level_http"}
    assert {f"sglang_{name}" for name in typed} <= Args.model_fields.keys()
