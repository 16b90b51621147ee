"""The demo's training beside TRL's GRPOTrainer: steps an hour, and exact match after as many steps.

    python -m benchmarks.against_trl [--steps 5] [--seed 1] [--questions 200] [--venv DIR] [--results DIR]

First `run_demo.sh` runs, then TRL with the settings that the run wrote down (`benchmarks/trl/grpo.py` says how they are
carried over): the same model folder, prompts in the same order, search server, generate and reward hooks, group and
step sizes, learning rates, KL loss and clipping, evaluated by the same questions. TRL generates with transformers on
the CPU, all waiting conversations in one batch, without gradient checkpointing, in float32, with all cores as threads.
One after the other, each has the machine for itself.

TRL is installed into an environment of its own, which sees the project's packages, so that torch and transformers are
the same; `--venv` names one to make or to use. Steps an hour leave out the first step, evaluations and the start. The
last line is one JSON object; its ratio is steps an hour, ours / TRL.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import whole_number
from tools.servers import retrieval_server

ROOT = Path(__file__).resolve().parents[1]
TRL = "trl==1.16.0"
CORPUS = "data/demo/corpus.jsonl.gz"


def environment(folder: Path) -> Path:
    """The Python of the environment with TRL in `folder`, which is made if it is not there."""
    python = folder / "bin/python"
    if not python.exists():
        print(f"-- {TRL} into {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True)
        packages = folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        (packages / "project.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n", encoding="utf-8")
        subprocess.run([python, "-m", "pip", "install", "--quiet", TRL], check=True, stdout=sys.stderr)
    return python


def run_ours(options: argparse.Namespace, run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run of the demo."""
    sizes = {"steps": options.steps, "seed": options.seed, "questions": options.questions, "run-dir": run_dir}
    words = [str(word) for name, value in sizes.items() for word in (f"--{name}", value)]
    subprocess.run(["bash", "run_demo.sh", *words], cwd=ROOT, check=True, stdout=sys.stderr)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def run_trl(python: Path, run_dir: Path, folder: Path) -> dict[str, Any]:
    """What TRL's side wrote of itself, after a run with the settings of the one in `run_dir`."""
    output = folder / "trl.json"
    threads = str(os.cpu_count())
    with retrieval_server(ROOT / CORPUS) as url:
        command = [python, "-m", "benchmarks.trl.grpo", "--run-dir", run_dir, "--search-url", url, "--output", output]
        own = os.environ | {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        subprocess.run([*command, "--threads", threads], cwd=ROOT, check=True, env=own, stdout=sys.stderr)
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def steps_an_hour(seconds: Sequence[float]) -> float:
    """By the mean of all steps but the first, which warms everything up."""
    return 3600 * len(seconds[1:]) / sum(seconds[1:])


def row(name: str, seconds: Sequence[float], evaluation: Mapping[str, float]) -> dict[str, Any]:
    """A line of the table: a name, steps an hour, exact match of the evaluation."""
    return {
        "name": name,
        "steps_per_hour": steps_an_hour(seconds),
        "greedy": evaluation["eval/demo/greedy/em"],
        "t1": evaluation["eval/demo/t1.0/em"],
    }


def table(rows: Sequence[Mapping[str, Any]], steps: int) -> str:
    """The comparison in markdown."""
    lines = [
        f"| | steps an hour | exact match after {steps} steps, greedy | at temperature 1 |",
        "| --- |" + " --- |" * 3,
    ]
    lines += [f"| {r['name']} | {r['steps_per_hour']:.0f} | {r['greedy']:.3f} | {r['t1']:.3f} |" for r in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=whole_number(2), default=5, help="steps of each side [5]")
    parser.add_argument("--seed", type=whole_number(), default=1, help="seed of both sides [1]")
    parser.add_argument("--questions", type=whole_number(), default=200, help="questions of an evaluation [200]")
    parser.add_argument(
        "--venv", type=Path, default=ROOT / "runs/trl_venv", help="the environment with TRL [runs/trl_venv]"
    )
    parser.add_argument(
        "--results", type=Path, help="where both sides' files go [a temporary folder, removed at the end]"
    )
    options = parser.parse_args()
    python = environment(options.venv.resolve())
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.results or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        records = run_ours(options, folder / "ours")
        trl = run_trl(python, folder / "ours", folder)
    steps = [record["time/step"] for record in records if record["step"] > 0]
    versions = ", ".join(f"{name} {number}" for name, number in trl["versions"].items())
    rows = [row("ours", steps, records[-1]), row("TRL", trl["step_seconds"], trl["evaluation"])]
    print(table(rows, options.steps))
    greedy, sampled = (records[0][f"eval/demo/{name}/em"] for name in ("greedy", "t1.0"))
    print(f"\nbefore training: greedy {greedy:.3f}, at temperature 1 {sampled:.3f}")
    print(f"{options.questions} questions; {versions}; {trl['threads']} threads, {os.cpu_count()} cores")
    ratio = rows[0]["steps_per_hour"] / rows[1]["steps_per_hour"]
    print(json.dumps({"name": "against_trl", "ours": rows[0], "reference": rows[1], "ratio": ratio}))


if __name__ == "__main__":
    main()
