"""Hooks in several processes: real Ray actors, and engines that answer by script over real HTTP."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from transformers import AutoTokenizer

from benchmarks.scaling.scripted_engines import Script, ScriptedEngines, engine_answer
from sleuth.arguments import Args, parse_args
from sleuth.cluster.placement import ray_session
from sleuth.cluster.rollout_workers import RolloutWorkerDiedError, RolloutWorkers
from sleuth.hooks import RolloutContext, StopRunError, rollout_context, share_of, step_metrics, use_rollout_context
from sleuth.metrics.progress import Tally
from sleuth.processes import ProcessName
from sleuth.rollout.journal import read_step, step_file
from sleuth.rollout.loop import RolloutError
from sleuth.rollout.manager import RolloutManager, mean_metrics
from sleuth.sample import Sample, SampleStatus, StopReason
from sleuth.search.service import SearchService, shared_service

pytestmark = pytest.mark.timeout(300)

DEMO = Path(__file__).parents[2] / "data/demo"
HERE = "tests.cluster.test_rollout_workers"
WORKERS = 2


class CannotTravel(StopRunError):
    """An error that cannot be pickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


async def search(query: str) -> list[str]:
    return ["a passage"]


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One turn and one search; what it notes says in which process, and cannot be pickled."""
    calls.append(sample.index)
    if (Path(args.run_dir) / "stop").exists():
        raise CannotTravel("the service is gone", "for good")
    if (Path(args.run_dir) / "fail").exists():
        raise ValueError(f"no luck with {sample.index}")
    if (Path(args.run_dir) / "leave").exists():
        raise KeyboardInterrupt
    if (Path(args.run_dir) / "stays").exists():
        sample.metadata["lock"] = threading.Lock()
    generation = await rollout_context().engine.generate(sample.trace.token_ids, sampling_params)
    sample.trace.append_model(generation.ids, generation.log_probs)
    await shared_service("test", lambda: SearchService(search, concurrency=8)).search(str(sample.index))
    sample.report(pid=os.getpid(), note=lambda: None, places=share_of(256), text="as it was")
    return sample.finish(SampleStatus.COMPLETED, StopReason.ANSWERED)


async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    return float(sample.index)


calls: list[int] = []


@step_metrics
def hook_metrics() -> dict[str, float]:
    counted = len(calls)
    calls.clear()
    return {"hook/constant": 3.0, "hook/calls": float(counted)}


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with ray_session(SimpleNamespace(ray_address=None, total_gpus=1, actor_num_nodes=1)):  # type: ignore[arg-type]
        yield


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Two engines; each turn takes the seconds of `request.param`, give or take half."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    script = Script(
        2, [], [b"{}"], engine_answer("<answer> Paris </answer>", tokenizer), getattr(request, "param", 0.0)
    )
    with ScriptedEngines(script) as scripted:
        yield scripted.urls


def arguments(folder: Path, *more: str) -> Args:
    words = [
        *("--hf-checkpoint", str(DEMO / "model"), "--prompt-data", str(DEMO / "train.parquet"), "--colocate"),
        *("--apply-chat-template", "--custom-generate-function-path", f"{HERE}.generate"),
        *("--custom-rm-path", f"{HERE}.reward", "--rollout-batch-size", "6", "--n-samples-per-prompt", "2"),
        *("--global-batch-size", "12", "--rollout-max-context-len", "1024", "--rollout-workers", str(WORKERS)),
        *("--run-dir", str(folder / "run"), "--save", str(folder / "save"), "--process-restarts", "1"),
        *("--eval-prompt-data", "some", f"{DEMO / 'test.parquet'}@[0:5]", "--eval-interval", "1"),
    ]
    (folder / "run").mkdir(parents=True, exist_ok=True)
    return parse_args([*words, *more])


def started(
    args: Args, urls: list[str], report: Any = None, *, again: bool = False
) -> tuple[RolloutManager, RolloutWorkers, list[ProcessName]]:
    workers = RolloutWorkers(args, args.run_dir, report)
    manager = RolloutManager(args, args.run_dir, workers=workers)
    processes = workers.wait_until_loaded()
    manager.connect(urls, {}, again=again)
    return manager, workers, processes


def recorded(folder: Path, step: int) -> list[dict[str, Any]]:
    """The samples in the journal, in order."""
    record = read_step(step_file(folder / "save/journal", step))
    assert record is not None
    return [
        {
            "place": place,
            "ids": sample.trace.token_ids,
            "reward": sample.reward,
            "row": sample.row,
            "notes": sample.notes,
            "numbers": sample.rollout_metrics,
        }
        for place, sample in sorted(record.samples.items())
    ]


def test_several_processes_make_what_one_makes(session: None, engines: list[str], tmp_path: Path) -> None:
    tallies: list[Tally] = []
    args = arguments(tmp_path / "many")
    manager, workers, processes = started(args, engines, tallies.append)
    many = manager.generate(1)
    evaluation = manager.evaluate(1)
    alone = arguments(tmp_path / "one", "--rollout-workers", "1")
    reference = RolloutManager(alone, alone.run_dir)
    reference.connect(engines, {})
    one = reference.generate(1)

    assert many.shards == one.shards  # tokens, masks, log-probabilities, advantages, and their order
    timed = ("perf/", "search/latency", "rollout/pid", "rollout/places", "hook/calls")
    untimed = [{k: v for k, v in data.metrics.items() if not k.startswith(timed)} for data in (many, one)]
    assert untimed[0] == untimed[1]
    assert many.metrics["search/calls"] == 12  # of all processes together
    assert many.metrics["search/latency_max"] > 0
    assert many.metrics["hook/constant"] == 3.0  # the mean, not the sum
    assert many.metrics["hook/calls"] == 12 / WORKERS  # of the workers, and not the 0 of the manager's process
    assert many.metrics["rollout/places"] == 256 // WORKERS
    assert evaluation["eval/some/greedy/questions"] == 5
    assert evaluation["eval/some/greedy/search/calls"] == 5
    assert evaluation["eval/some/greedy/seconds"] > 0

    samples, others = recorded(tmp_path / "many", 1), recorded(tmp_path / "one", 1)
    pids = [int(sample["numbers"].pop("pid")) for sample in samples]
    assert pids == [processes[index // 2 % WORKERS].pid for index in range(12)]  # a prompt's samples share a process
    assert {int(sample["numbers"].pop("pid")) for sample in others} == {os.getpid()}
    for sample in (*samples, *others):
        sample["numbers"].pop("places")
        assert "lambda" in sample["notes"].pop("note")
    assert samples == others
    assert {name: value > 0.01 for name, value in workers.memory.items()} == {
        f"perf/memory/rollout_worker_{index}": True for index in range(WORKERS)
    }


def test_what_the_journal_has_is_not_made_again(session: None, engines: list[str], tmp_path: Path) -> None:
    args = arguments(tmp_path)
    first = started(args, engines)[0].generate(1)
    manager, _, _ = started(args, engines, again=True)
    second = manager.generate(1)
    assert second.metrics["rollout/from_journal"] == 12
    assert second.shards == first.shards


def while_running(manager: RolloutManager, meanwhile: Callable[[], None]) -> Any:
    """The step that the manager makes, while something is done in another thread half a second after its start."""
    timer = threading.Timer(0.5, meanwhile)
    timer.start()
    try:
        return manager.generate(1)
    finally:
        timer.join()


@pytest.mark.parametrize("engines", [2.0], indirect=True)
def test_a_killed_worker_is_started_again_and_a_second_time_ends_the_run(
    session: None, engines: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tallies: list[Tally] = []
    manager, _, processes = started(arguments(tmp_path), engines, tallies.append)
    data = while_running(manager, lambda: os.kill(processes[1].pid, signal.SIGKILL))
    assert data.metrics["reward/mean"] == sum(range(12)) / 12
    assert "rollout worker 1 ended: killed, or out of memory" in caplog.text
    assert "(1 of at most 1 times)" in caplog.text
    assert tallies[-1].what == "step 1"
    assert tallies[-1].total == 12
    assert any("in flight" in tally.notes for tally in tallies)
    pids = {int(sample["numbers"]["pid"]) for sample in recorded(tmp_path, 1)}
    assert len(pids) == WORKERS
    assert processes[1].pid not in pids

    (again,) = pids - {process.pid for process in processes}
    with pytest.raises(RolloutWorkerDiedError, match=r"rollout worker 1 ended.*--process-restarts"):
        while_running(manager, lambda: os.kill(again, signal.SIGKILL))


def test_errors_of_hooks_arrive_as_they_are(session: None, engines: list[str], tmp_path: Path) -> None:
    args = arguments(tmp_path)
    manager, _, _ = started(args, engines)
    (args.run_dir / "fail").touch()
    with pytest.raises(RolloutError, match=r"hook_error: generate hook .*ValueError: no luck with \d+"):
        manager.generate(1)
    (args.run_dir / "fail").unlink()
    (args.run_dir / "stays").touch()
    with pytest.raises(RolloutError, match=r"cannot pickle '_thread.lock'.*in its metadata.*--rollout-workers 1"):
        manager.generate(1)
    (args.run_dir / "stays").unlink()
    (args.run_dir / "leave").touch()
    with pytest.raises(RolloutError, match="KeyboardInterrupt"):
        manager.generate(1)
    (args.run_dir / "leave").unlink()
    (args.run_dir / "stop").touch()
    with pytest.raises(RuntimeError, match="the service is gone"):
        manager.generate(1)
    logs = sorted(path.name for path in (args.run_dir / "logs").glob("rollout_worker_*.log"))
    assert logs == [f"rollout_worker_{index}.log" for index in range(WORKERS)]
    assert "no luck with" in "".join((args.run_dir / "logs" / name).read_text() for name in logs)


@pytest.mark.parametrize("engines", [1.0], indirect=True)
def test_workers_are_told_of_other_engines(session: None, engines: list[str], tmp_path: Path) -> None:
    manager, _, _ = started(arguments(tmp_path), ["http://127.0.0.1:9"])
    data = while_running(manager, lambda: manager.use_engines(engines))
    assert data.metrics["reward/mean"] == sum(range(12)) / 12


def test_workers_end_with_the_process_that_made_them(session: None, engines: list[str], tmp_path: Path) -> None:
    class Maker:
        def make(self) -> list[Any]:
            self.workers = RolloutWorkers(arguments(tmp_path), tmp_path / "run")
            return self.workers.wait_until_loaded()

    actor = ray.remote(Maker).options(num_cpus=0).remote()  # type: ignore[attr-defined]
    processes = ray.get(actor.make.remote())
    assert all(process.runs() for process in processes)
    ray.kill(actor)
    deadline = time.monotonic() + 30
    while any(process.runs() for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_limits_are_shared_among_the_processes() -> None:
    context: Any = SimpleNamespace()
    assert share_of(10) == 10
    for workers, share in ((1, 10), (3, 3), (20, 1)):
        with use_rollout_context(RolloutContext(context, context, workers=workers)):
            assert share_of(10) == share
            assert SearchService(search, concurrency=10)._places._value == share


def test_the_mean_is_over_those_that_have_a_metric() -> None:
    assert mean_metrics([{"a": 1.0, "b": 5.0}, {"a": 3.0}]) == {"a": 2.0, "b": 5.0}
    assert mean_metrics([]) == {}
