"""Makes training batches from prompt data, hooks and engines.

`RolloutManager` drives real engines; `SupervisedManager` reads finished trajectories and needs no engines.
Both are plain classes; `sleuth.cluster` runs them in Ray actors.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from transformers import AutoTokenizer

from sleuth.algo.optimizer_steps import OptimizerStepBatch
from sleuth.arguments import Args, check_tokenizer
from sleuth.data import PromptStream, load_rows, load_sft_rows
from sleuth.hooks import RolloutContext, drain_step_metrics, use_rollout_context
from sleuth.metrics.progress import Report
from sleuth.metrics.rollout_metrics import evaluation_metrics, evaluation_name, overlong_wait, rollout_metrics
from sleuth.metrics.trajectories import spread, step_trajectories, write_trajectories
from sleuth.rollout.engine_client import EngineClient, embedding_size
from sleuth.rollout.hook_runner import load_hooks
from sleuth.rollout.journal import Journal
from sleuth.rollout.journal_settings import has_journal, journal_settings
from sleuth.rollout.loop import GenerationLoop
from sleuth.rollout.reward_shaping import shape_rewards
from sleuth.rollout.train_batches import shard_batch, train_samples
from sleuth.rollout.worker import WorkerPool, make_client
from sleuth.sample import Sample
from sleuth.search.service import add_searches

logger = logging.getLogger(__name__)

PROBE_TOKENS = 256
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StepData:
    """The data of one step, `shards[data-parallel rank][optimizer step]`, and its metrics."""

    shards: list[list[OptimizerStepBatch]]
    metrics: dict[str, float]


class RolloutManager:
    """Generates, scores and packs the samples of a step; evaluates; probes the engines."""

    def __init__(
        self, args: Args, run_dir: Path, report: Report | None = None, workers: WorkerPool | None = None
    ) -> None:
        """Load the data and the hooks; `report` is told how far a rollout is. `workers` run the hooks [this process].

        Raises ValueError if something in data or hooks is wrong.
        """
        self.args, self.run_dir, self._workers = args, run_dir, workers
        self.loop = GenerationLoop(args, load_hooks(args), report, workers)
        self.tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
        self.vocab_size = embedding_size(args.hf_checkpoint)
        check_tokenizer(self.tokenizer, self.vocab_size)
        self.eval_rows = {
            name: load_rows(path, args, self.tokenizer, evaluation=True) for name, path in args.eval_sets.items()
        }
        if args.eval_only:  # the probe needs some rows, too
            self.rows = next(iter(self.eval_rows.values()))
        else:
            self.rows = load_rows(args.prompt_data, args, self.tokenizer)
        self.stream = PromptStream(self.rows, seed=args.seed, shuffle=args.rollout_shuffle)
        self.journal = run_journal(args)
        # The whole run uses one event loop: the HTTP sessions of the hooks live as long as it does.
        self._runner = asyncio.Runner()

    def connect(
        self, engine_urls: list[str], state: dict[str, Any], router_url: str | None = None, *, again: bool = False
    ) -> None:
        """Use the engines at these URLs, through a router if there is one, and restore the `state` of a checkpoint.

        That is {} in a new run. `again`: this manager takes the place of one that ended in the middle of the run.
        """
        self.engine = make_client(self.args, engine_urls, self.vocab_size, router_url)
        self._runner.get_loop()  # made here, so that `use_engines` may ask for it in another thread
        if self._workers is not None:
            self._workers.connect(engine_urls, router_url)
        if self.journal is not None:
            self.journal.start(again=again)
        if state:
            self.stream.load_state_dict(state["stream"])

    def use_engines(self, urls: list[str]) -> None:
        """Send requests to these engines from now on; can be called from another thread while others are under way."""
        self._runner.get_loop().call_soon_threadsafe(self.engine.use, urls)
        if self._workers is not None:
            self._workers.use_engines(urls)

    def generate(self, step: int) -> StepData:
        """Roll out one step. Raises RolloutError when too many trajectories fail."""
        self._take_counts()  # of an evaluation in between, and so below
        start = time.perf_counter()
        journal = None if self.journal is None else self.journal.step(step)
        rollout = self._run(self.loop.rollout(self.stream.next_groups, journal, f"step {step}"))
        seconds = time.perf_counter() - start
        samples = rollout.samples
        shaping = shape_rewards(self.args, samples)
        counted, cached_share = self._take_counts()
        metrics = shaping | rollout_metrics(samples, rollout.failed) | counted
        metrics["rollout/filtered_groups"] = float(rollout.filtered_groups)
        metrics["perf/rollout_tokens_per_second"] = sum(sum(s.trace.loss_mask) for s in samples) / seconds
        metrics["perf/prefix_cache_share"] = cached_share
        if journal is not None:
            journal.finish(rollout.groups, self.state_dict())
            metrics["rollout/from_journal"] = float(journal.taken)
        self._write_trajectories(step_trajectories(self.run_dir, step), samples)
        logged = spread(range(len(samples)), self.args.log_trajectories)
        return StepData(shard_batch(self.args, train_samples(self.args, rollout.groups, set(logged))), metrics)

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate every data set of `--eval-prompt-data` at every `--eval-temperature`."""
        metrics: dict[str, float] = {}
        for name, rows in self.eval_rows.items():
            for temperature in self.args.eval_temperature:
                full_name = evaluation_name(name, temperature)
                self._take_counts()  # of what came before, and so below
                rollout = self._run(self.loop.evaluate(rows, temperature, f"evaluation of {full_name}"))
                metrics |= evaluation_metrics(rollout.samples, full_name, rollout.failed)
                if wait := overlong_wait(rollout.samples):
                    logger.warning("evaluation %s: %s", full_name, wait)
                metrics |= {f"eval/{full_name}/{key}": value for key, value in self._take_counts()[0].items()}
                path = self.run_dir / "trajectories" / f"eval_{step:07d}_{full_name.replace('/', '_')}.jsonl"
                self._write_trajectories(path, rollout.samples, evaluation=True)
        return metrics

    def probe_ids(self) -> list[int]:
        """A fixed sequence of token ids on whose log-probabilities engines and trainer must agree."""
        ids = self.rows[0].prompt_ids[:PROBE_TOKENS]
        return ids if len(ids) > 1 else ids * 2  # the first has no log-probability, so one alone shows nothing

    def probe_engines(self) -> list[list[float]]:
        """For each engine the log-probabilities (nats, temperature 1) of the probe's tokens after the first."""
        return self._run(self._score_everywhere(self.probe_ids()))

    def _take_counts(self) -> tuple[dict[str, float], float]:
        """The hooks' step metrics since the last call, and the share of prompt tokens from the engines' caches."""
        counts = [] if self._workers is None else self._workers.take_counts()
        sent, cached = self.engine.take_prompt_tokens()
        for count in counts:
            sent, cached = sent + count.prompt_tokens, cached + count.cached_tokens
            add_searches(count.searches)
        # Where workers have a metric, too, theirs counts: no trajectory ran here.
        return drain_step_metrics() | mean_metrics([count.metrics for count in counts]), cached / max(1, sent)

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        with use_rollout_context(RolloutContext(self.engine, self.tokenizer, self.vocab_size)):
            return self._runner.run(coroutine, context=contextvars.copy_context())

    async def _score_everywhere(self, ids: list[int]) -> list[list[float]]:
        async def score(url: str) -> list[float]:
            async with EngineClient(
                [url], timeout=self.args.sync_timeout, max_concurrency=1, vocab_size=self.vocab_size
            ) as engine:
                return await engine.score(ids)

        return await asyncio.gather(*map(score, self.engine.urls))

    def state_dict(self) -> dict[str, Any]:
        return {"stream": self.stream.state_dict()}

    def _write_trajectories(self, path: Path, samples: list[Sample], *, evaluation: bool = False) -> None:
        write_trajectories(path, samples, self.tokenizer, self.args.log_trajectories, evaluation=evaluation)


def mean_metrics(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each metric the mean over those that have it."""
    names = dict.fromkeys(name for metrics in found for name in metrics)
    return {name: mean(metrics[name] for metrics in found if name in metrics) for name in names}


def run_journal(args: Args) -> Journal | None:
    """The journal of the run, beside its checkpoints; None if it has none."""
    if args.save is None or not has_journal(args):
        return None
    source = None if args.finetune else args.load
    return Journal(args.save, source, journal_settings(args), keep_all=args.save_keep == 0)


class WithoutEngines:
    """What a manager answers that has its samples from elsewhere."""

    def evaluate(self, step: int) -> dict[str, float]:
        """No metrics: there is no engine that could answer."""
        return {}

    def use_engines(self, urls: list[str]) -> None:
        """Nothing to do."""

    def probe_ids(self) -> list[int]:
        """No ids: there is no engine that could differ from the trainer."""
        return []

    def probe_engines(self) -> list[list[float]]:
        return []


class SupervisedManager(WithoutEngines):
    """As RolloutManager, but reads finished trajectories (`--loss-type sft`) and needs no engines."""

    def __init__(self, args: Args) -> None:
        self.args = args
        tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
        check_tokenizer(tokenizer, embedding_size(args.hf_checkpoint))
        self.stream = load_sft_rows(args.prompt_data, tokenizer, seed=args.seed, shuffle=args.rollout_shuffle)

    def connect(
        self, engine_urls: list[str], state: dict[str, Any], router_url: str | None = None, *, again: bool = False
    ) -> None:
        """Restore the `state` of a checkpoint ({} in a new run); there are no engines."""
        if state:
            self.stream.load_state_dict(state["stream"])

    def generate(self, step: int) -> StepData:
        samples = self.stream.next_samples(self.args.rollout_batch_size)
        tokens = sum(len(sample.token_ids) for sample in samples)
        return StepData(shard_batch(self.args, samples), {"rollout/tokens": float(tokens)})

    def state_dict(self) -> dict[str, Any]:
        return {"stream": self.stream.state_dict()}
