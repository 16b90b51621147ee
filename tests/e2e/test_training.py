"""The real loop: Ray, an SGLang engine, the Megatron trainer, a retrieval server, the shipped model and data."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from sleuth.metrics.trajectories import read_trajectories, trainer_file
from tests.e2e.conftest import MODEL
from tests.e2e.runs import processes_of, run_training, started_training, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_trains_saves_and_resumes(tmp_path, flags):
    evaluation = ["--eval-prompt-data", "demo", "data/demo/test.parquet@[0:8]", "--eval-interval", "2"]
    code, output = run_training([*flags, *evaluation])
    assert code == 0, output
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["train/rollout_logprob_abs_diff"] < 1e-4 for line in lines)
    assert all(line["train/train_rollout_logprob_abs_diff"] < 1e-4 for line in lines[1:])
    assert "eval/demo/greedy/em" in lines[0]
    assert "eval/demo/greedy/em" in lines[2]
    assert lines[1]["rollout/searches"] > 0
    assert lines[1]["train/grad_norm"] > 0
    assert (tmp_path / "save/latest_checkpointed_iteration.txt").read_text() == "2"
    for line in (lines[0], lines[2]):  # whether the model of step 2 searches greedily is chance
        assert ("eval/demo/greedy/search/requests" in line) == (line["eval/demo/greedy/searches"] > 0)
    assert processes_of(tmp_path / "run") == []
    check_trainer_log_probs(tmp_path / "run/trajectories")
    check_evaluation_alone(tmp_path, [*flags, *evaluation], lines)

    resumed = ["--load", str(tmp_path / "save"), "--num-rollout", "3", "--update-weights-through", "disk"]
    code, output = run_training([*flags, *resumed])
    assert code == 0, output
    assert f"resumed from step 2 of {tmp_path / 'save'}\n" in output
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[3]["train/rollout_logprob_abs_diff"] < 1e-4
    assert lines[3]["rollout/weight_version/max"] == 2
    cursor = [
        json.loads((tmp_path / f"save/iter_{step:07d}/rollout_state.json").read_text())["stream"]["position"]
        for step in (1, 2, 3)
    ]
    assert cursor == [4, 8, 12]


def check_trainer_log_probs(folder: Path) -> None:
    """Beside the trajectories of each step are the trainer's log-probabilities, close to the engine's."""
    for step in (1, 2):
        path = folder / f"step_{step:07d}.jsonl"
        records = read_trajectories(path)
        kept = json.loads(trainer_file(path).read_text())["log_probs"]
        for record, log_probs in zip(records, kept, strict=True):
            trained = [value is not None for value in log_probs]
            assert trained == [bool(mask) for mask in record["loss_mask"]]
            pairs = zip(log_probs, record["log_probs"], strict=True)
            # Both are rounded to four decimals.
            assert all(abs(trainer - engine) < 3e-4 for trainer, engine in pairs if trainer is not None)


def check_evaluation_alone(tmp_path: Path, flags: list[str], trained: list[dict]) -> None:
    """`--eval-only`, of the checkpoint and of the model before training, finds what the run itself found."""
    load = ["--load", str(tmp_path / "save")]
    for step, more in ((2, load), (0, [])):
        run_dir = tmp_path / f"evaluated_{step}"
        code, output = run_training([*flags, "--eval-only", *more, "--run-dir", str(run_dir)])
        assert code == 0, output
        (line,) = metrics_of(run_dir)
        assert line["step"] == step
        for name in ("em", "searches", "response_length", "questions"):
            assert line[f"eval/demo/greedy/{name}"] == trained[step][f"eval/demo/greedy/{name}"]
        assert (run_dir / f"trajectories/eval_{step:07d}_demo_greedy.jsonl").is_file()
        assert not (run_dir / "evaluated_weights").exists()
    code, output = run_training([*flags, "--eval-only", *load])
    assert code == 1
    assert "found the metrics of another one (steps 0 to 2)" in output
    assert metrics_of(tmp_path / "run") == trained


def test_a_supervised_run_trains_saves_and_resumes(tmp_path):
    data = tmp_path / "trajectories.jsonl"
    segments = [{"text": "who wrote it?", "weight": 0.0}, {"text": "<answer> she did </answer>", "weight": 1.0}]
    data.write_text("".join(json.dumps({"segments": segments}) + "\n" for _ in range(6)))
    flags = [
        *("--loss-type", "sft", "--hf-checkpoint", str(MODEL), "--prompt-data", str(data), "--lr", "1e-3"),
        *("--rollout-batch-size", "4", "--global-batch-size", "4", "--num-rollout", "2", "--save-interval", "1"),
        *("--run-dir", str(tmp_path / "run"), "--save", str(tmp_path / "save")),
    ]
    code, output = run_training(flags)
    assert code == 0, output
    code, output = run_training([*flags, "--load", str(tmp_path / "save"), "--num-rollout", "3"])
    assert code == 0, output
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3]  # nothing is evaluated before training
    assert lines[0]["train/loss"] > lines[2]["train/loss"]
    cursor = json.loads((tmp_path / "save/iter_0000003/rollout_state.json").read_text())["stream"]
    assert (cursor["epoch"], cursor["position"]) == (1, 6), "twelve rows of six"
    assert processes_of(tmp_path / "run") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_and_keeps_the_last_checkpoint(tmp_path, flags, number):
    with started_training([*flags, "--num-rollout", "100"]) as process:
        tracker = tmp_path / "save/latest_checkpointed_iteration.txt"
        wait_until(tracker.exists, "the first checkpoint")
        process.send_signal(number)
        output, _ = process.communicate(timeout=90)
    assert process.returncode == 1
    step, save = int(tracker.read_text()), tmp_path / "save"
    assert f"; step {step} is saved in {save}; --load {save} goes on from it" in output
    assert "has the engine died" not in output
    assert "Traceback" not in output
    wait_until(lambda: not processes_of(tmp_path / "run"), "an end of all processes", seconds=20)
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == list(range(step + 1))
    assert (tmp_path / f"save/iter_{step:07d}/metadata.json").exists()


def test_a_killed_engine_is_started_again_and_a_second_time_ends_the_run(tmp_path, flags):
    run_dir = tmp_path / "run"

    def kill_engine():
        next(p for p in processes_of(run_dir) if "sleuth.engine.launch" in p.cmdline()).kill()

    def steps_done():
        return len(metrics_of(run_dir))

    more = ["--num-rollout", "1000", "--process-restarts", "1", "--rollout-workers", "2"]
    with started_training([*flags, *more]) as process:
        wait_until((tmp_path / "save/latest_checkpointed_iteration.txt").exists, "the first checkpoint")
        next(p for p in processes_of(run_dir) if "RolloutActor" in p.name() + " ".join(p.cmdline())).kill()
        before = steps_done()
        wait_until(lambda: steps_done() > before + 1, "a step after the rollout process was killed")
        kill_engine()
        before = steps_done()
        wait_until(lambda: steps_done() > before + 1, "a step after the engine was killed")
        kill_engine()
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "the rollout process ended: killed, or out of memory" in output
    assert "was killed by signal 9; its log: " in output
    assert "it is started again (1 of at most 1 times)" in output
    assert "error: EngineDiedError: engine 0: the engine at http://127.0.0.1:" in output
    assert "it may not be started again (--process-restarts)" in output
    assert "--load" in output
    assert all(line["train/rollout_logprob_abs_diff"] < 1e-4 for line in metrics_of(run_dir))
    wait_until(lambda: not processes_of(run_dir), "an end of all processes", seconds=20)


def test_a_killed_driver_leaves_nothing_running(tmp_path, flags):
    with started_training([*flags, "--num-rollout", "100"]) as process:
        wait_until((tmp_path / "save/latest_checkpointed_iteration.txt").exists, "the first checkpoint")
        process.kill()
    wait_until(lambda: not processes_of(tmp_path / "run"), "an end of all processes", seconds=30)


def test_a_retrieval_server_that_goes_down_stops_the_run(tmp_path, flags):
    """As if it had answered the test question before the start, and never again."""
    config = tmp_path / "search.yaml"
    config.write_text(
        "search_r1: {local: {search_url: 'http://127.0.0.1:9/retrieve'}, topk: 1, max_turns: 2,"
        " max_observation_tokens: 48, search_retries: 1, search_timeout: 2}\n"
    )
    # The model does not always search: with the usual rate a step may get by.
    code, output = run_training([*flags, "--no-search-check", "--max-failure-rate", "0.02"])
    assert code != 0
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "127.0.0.1:9" in error
    assert "search" in error
    assert processes_of(tmp_path / "run") == []


def test_data_without_the_label_column_is_told_in_one_line(tmp_path, flags):
    code, output = run_training([*flags, "--label-key", "target"])
    assert code != 0
    assert "--label-key" in output
    assert "reward_model" in output
    assert "Traceback" not in output
    assert processes_of(tmp_path / "run") == []


@pytest.mark.parametrize("through", ["tensor", "distributed"])
def test_two_ranks_send_weights_to_two_engines(tmp_path, flags, through):
    """By broadcast to engines on devices of their own; both sides are left without complaint at the end."""
    layout = ["--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--num-rollout", "1"]
    layout += ["--rollout-num-gpus", "2", "--update-weights-through", through]
    layout += [] if through == "tensor" else ["--no-colocate"]
    code, output = run_training([*flags, *layout])
    assert code == 0, output
    [line] = metrics_of(tmp_path / "run")[-1:]
    assert line["step"] == 1
    assert line["train/rollout_logprob_abs_diff"] < 1e-4
    assert line["perf/prefix_cache_share"] > 0
    log = (tmp_path / "run/logs/trainer_0.log").read_text()
    assert "weights 1: " in log
    assert "to 2 engine(s)" in log
    assert processes_of(tmp_path / "run") == []


def test_a_run_whose_control_store_is_killed_says_so_and_leaves_nothing(tmp_path, flags):
    tracker = tmp_path / "save/latest_checkpointed_iteration.txt"
    with started_training([*flags, "--num-rollout", "100"]) as process:
        wait_until(lambda: tracker.exists() or process.poll() is not None, "the first checkpoint")
        tree = psutil.Process(process.pid).children(recursive=True)
        (store,) = [child for child in tree if child.name() == "gcs_server"]
        store.kill()
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    *_, death, _, advice = output.splitlines()
    assert death.startswith(f"error: RayDiedError: expected Ray's control store (gcs_server, process {store.pid})")
    assert advice.startswith(f"--load {tmp_path / 'save'} goes on from step ")
    wait_until(lambda: not any(child.is_running() for child in tree), "the end of all processes of the run", 30)
    assert processes_of(tmp_path / "run") == []
