"""The controls' script with a stand-in for run_demo.sh: resuming, figure, table; and that train.py takes all flags."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from generate_with_search import SearchSettings, check_args
from sleuth.arguments import parse_args
from sleuth.hooks import load_hook
from tools import run_controls
from tools.controls.catalog import CONTROLS
from tools.controls.results import BEGIN, END, put_into

ROOT = Path(__file__).parents[2]
STAND_IN = """
import json, sys
from pathlib import Path
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder, steps = Path(given["--run-dir"]), int(given["--steps"])
assert not folder.exists()
folder.mkdir(parents=True)
(folder / "flags.json").write_text(json.dumps(sys.argv[1:]))
change = {"before": 0.1, "after": 0.3 + 0.1 * int(given["--seed"]), "change": 0.0}
keys = ("exact_match_greedy", "exact_match_t1", "searches_t1", "format_t1")
hop = dict.fromkeys(keys, change)
names = ("greedy/em", "t1.0/em", "t1.0/searches")
lines = [{"step": step} | {f"eval/demo/{name}": 0.1 for name in names} for step in (0, steps)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
if (Path.cwd() / "broken").exists():
    sys.exit(3)
summary = {"steps": steps, "questions": int(given["--questions"]), "table": hop}
summary["hops"] = {"one_hop": hop, "two_hop": hop}
(folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A root folder whose run_demo.sh writes made-up results at once."""
    root = tmp_path / "root"
    (root / "docs/images").mkdir(parents=True)
    (root / "stand_in.py").write_text(STAND_IN)
    (root / "run_demo.sh").write_text(f'exec {shlex.quote(sys.executable)} {root}/stand_in.py "$@"\n')
    (root / "evidence.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    monkeypatch.setattr(run_controls, "ROOT", root)
    monkeypatch.setattr(run_controls, "EVIDENCE", root / "evidence.md")
    monkeypatch.setattr(run_controls, "FIGURE", root / "docs/images/controls.png")
    monkeypatch.setattr(run_controls, "MEASUREMENTS", root / "docs/measurements/controls.json")
    return root


def run(root, *more):
    return run_controls.main(["--out", str(root / "out"), "--only", "base", "shuffled", "--steps", "4", *more])


def test_all_runs_then_a_table_of_means_and_a_figure(stand_in, capsys):
    assert run(stand_in, "--docs") == 0
    out = stand_in / "out"
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == [
        *("base-seed1", "base-seed2", "shuffled-seed1", "shuffled-seed2")
    ]
    page = (stand_in / "evidence.md").read_text()
    assert "| the demo as it is | 2 | 0.10 -> 0.45 (0.40 to 0.50) |" in page
    assert page.startswith("before\n")
    assert page.endswith(f"{END}\nafter\n")
    assert "old" not in page
    assert "Not run yet: reward for format alone" in page  # the page has all controls, whichever were asked for
    assert (stand_in / "docs/images/controls.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "4 of 4 runs are done" in printed
    assert printed.count("+ bash ") == 4
    flags = json.loads((out / "shuffled-seed2/flags.json").read_text())
    assert flags[flags.index("--") + 1 :] == list(CONTROLS[1].flags)


def test_started_again_it_runs_only_what_is_missing(stand_in, capsys):
    assert run(stand_in, "--seeds", "1") == 0
    capsys.readouterr()
    left = stand_in / "out/shuffled-seed2.unfinished"
    left.mkdir()
    assert run(stand_in) == 0
    assert capsys.readouterr().out.count("+ bash ") == 2
    assert not left.exists()
    assert run(stand_in) == 0
    assert "+ bash " not in capsys.readouterr().out


def test_runs_of_another_length_do_not_count(stand_in, capsys):
    assert run(stand_in, "--seeds", "1") == 0
    assert run_controls.main(["--out", str(stand_in / "out"), "--only", "base", "--seeds", "1", "--steps", "5"]) == 0
    assert json.loads((stand_in / "out/base-seed1/summary.json").read_text())["steps"] == 5


def test_runs_whose_folder_is_gone_stay_in_the_page(stand_in):
    assert run(stand_in, "--seeds", "1", "--docs") == 0
    shutil.rmtree(stand_in / "out")
    assert run(stand_in, "--seeds", "2", "--docs") == 0
    page = (stand_in / "evidence.md").read_text()
    assert "| the demo as it is | 2 | 0.10 -> 0.45 (0.40 to 0.50) |" in page
    shutil.rmtree(stand_in / "out")
    assert run(stand_in, "--seeds", "2", "--questions", "100", "--docs") == 0
    assert "| the demo as it is | 1 | 0.10 -> 0.50 |" in (stand_in / "evidence.md").read_text()
    kept = json.loads((stand_in / "docs/measurements/controls.json").read_text())
    assert len(kept) == 6, "runs of another size stay in the file"


def test_a_run_that_fails_is_named_and_tried_again(stand_in, capsys):
    (stand_in / "broken").touch()
    assert run(stand_in, "--seeds", "1") == 1
    captured = capsys.readouterr()
    assert captured.err.count("failed: bash ") == 2
    assert "0 of 2 runs are done" in captured.out
    (stand_in / "broken").unlink()
    assert run(stand_in, "--seeds", "1") == 0


def test_a_stopped_script_stops_its_run_too(tmp_path):
    pid_file = tmp_path / "pid"
    (tmp_path / "run_demo.sh").write_text(
        f"echo $$ > {pid_file}.part && mv {pid_file}.part {pid_file}\nexec sleep 600\n"
    )
    code = (
        "import sys; from pathlib import Path; from tools import run_controls\n"
        f"run_controls.ROOT = Path({str(tmp_path)!r})\n"
        f"sys.exit(run_controls.main(['--only', 'base', '--seeds', '1', '--out', {str(tmp_path / 'out')!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not pid_file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="no such pair"):
        put_into("a page", "a table")


def test_names_are_different_and_each_control_says_what_to_conclude():
    assert len({control.name for control in CONTROLS}) == len(CONTROLS) == 9
    assert all(control.expectation.endswith(".") for control in CONTROLS)
    assert [control.name for control in CONTROLS if not control.flags] == ["base"]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_train_takes_the_flags_of_each_control_after_those_of_the_demo(control, tmp_path):
    script = (ROOT / "run_demo.sh").read_text().replace("\\\n", " ")
    command = next(line for line in script.splitlines() if " train.py " in line)
    command = command.replace(
        '"${COLUMNS_USED[@]}"', "--input-key prompt --label-key reward_model --apply-chat-template"
    )
    words = [word for word in shlex.split(command.partition(" train.py ")[2]) if word != "${FLAGS[@]}"]
    settings_of_the_demo = tmp_path / "search.yaml"  # as the script makes it
    settings_of_the_demo.write_text("search_r1: {search_backend: local, local: {search_url: 'http://127.0.0.1:9/x'}}\n")
    variables = {"$MODEL": "data/demo/model", "$STEPS": "40", "$SEED": "1", "$QUESTIONS": "200"}
    variables |= {"$RUN_DIR": str(tmp_path), "$HOOKS": "generate_with_search", "$TURN_TOKENS": "48"}
    for variable, value in variables.items():
        words = [word.replace(variable, value) for word in words]
    args = parse_args([*words, *control.flags])
    check_args(args)
    settings = SearchSettings.of(args)
    assert args.num_rollout == 40
    assert settings.search_backend == (
        "tools.controls.hooks.unrelated_search" if control.name == "unrelated" else "local"
    )
    assert (settings.max_turns == 0) == (control.name == "search_off")
    assert args.use_kl_loss == (control.name not in ("no_kl", "dapo"))
    for path in (args.custom_rm_path, args.custom_generate_function_path):
        load_hook(path, "reward" if path == args.custom_rm_path else "generate")
