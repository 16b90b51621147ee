"""A process that runs hooks for a rollout manager in another one: with several, hooks run on several cores.

Samples travel as bytes, packed here and by the manager: that is cheaper than whatever carries them would do it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import AutoTokenizer

from sleuth.arguments import Args
from sleuth.hooks import RolloutContext, drain_step_metrics, use_rollout_context
from sleuth.rollout.engine_client import EngineClient, embedding_size
from sleuth.rollout.hook_runner import HookRunner, load_hooks, told
from sleuth.rollout.journal import journal_entry, plain_notes
from sleuth.rollout.journal_settings import has_journal
from sleuth.rollout.loop import RolloutError, Workers, portable
from sleuth.sample import Sample
from sleuth.search.service import Searches, take_searches

PATIENCE_SECONDS = 60.0
"""Within them the driver notices that an engine has ended, and says which others there are."""

GATHER_SECONDS = 0.01
"""For which a finished sample waits for others: fewer and larger messages cost much less."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a process counted since it was last asked. `metrics`: of the hooks' own `step_metrics`."""

    prompt_tokens: int
    cached_tokens: int
    searches: Searches
    metrics: dict[str, float]


def make_client(
    args: Args, urls: Sequence[str], vocab_size: int, router_url: str | None, share: int = 1
) -> EngineClient:
    """A client for hooks. `share`: so many processes have one, and share the places that engines have for requests."""
    client = EngineClient(
        urls,
        timeout=args.engine_timeout,
        max_concurrency=max(1, args.rollout_max_concurrency // share),
        vocab_size=vocab_size,
        router_url=router_url,
    )
    client.patience = PATIENCE_SECONDS if args.process_restarts else 0.0
    return client


class WorkerPool(Workers, Protocol):
    """All workers of a rollout, as its manager uses them."""

    def connect(self, urls: Sequence[str], router_url: str | None) -> None:
        """Use these engines, through a router if there is one."""

    def use_engines(self, urls: Sequence[str]) -> None:
        """Send requests to these engines from now on; can be called in any thread."""

    def take_counts(self) -> list[Counts]:
        """What each worker counted since it was last asked."""


Task = tuple[int, bytes]
"""A number by which the manager knows a sample again, and what `packed_task` made of it."""
Answer = tuple[int, bytes | Exception]
"""The task's number, and what `unpacked` reads; or the error by which a hook ends the run."""


class TrajectoryWorker:
    """Worker `index` of `args.rollout_workers`. All methods are called in the thread of one running event loop."""

    def __init__(self, args: Args, index: int) -> None:
        """Load the hooks; ValueError if something in them is wrong."""
        self.args, self.index = args, index
        self._runner = HookRunner(args, load_hooks(args))
        self._tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
        self._vocab_size = embedding_size(args.hf_checkpoint)
        self._journaled = has_journal(args)
        self._watching: AbstractContextManager[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: list[Answer] = []
        self._answered = asyncio.Event()

    def connect(self, urls: Sequence[str], router_url: str | None) -> None:
        """Use these engines, through a router if there is one."""
        workers = self.args.rollout_workers
        # Of engines that are equally busy a client takes the first: each worker has another one there.
        first = self.index * len(urls) // workers
        turned = [*urls[first:], *urls[:first]]
        self._engine = make_client(self.args, turned, self._vocab_size, router_url, workers)
        self._context = RolloutContext(self._engine, self._tokenizer, self._vocab_size, workers)

    def use_engines(self, urls: Sequence[str]) -> None:
        """Send requests to these engines from now on."""
        self._engine.use(urls)

    def begin(self, what: str, total: int) -> None:
        """Watch hooks from now on, as a part of `what`, such as "step 3" with `total` trajectories."""
        self.end()
        self._watching = self._runner.watching(f"{what}, rollout worker {self.index}", total)
        self._watching.__enter__()

    def end(self) -> None:
        """The end of what began."""
        if self._watching is not None:
            self._watching.__exit__(None, None, None)
        self._watching = None

    def start(self, tasks: Sequence[Task]) -> None:
        """Run the hooks on these samples; `collect` returns what comes of them."""
        for number, task in tasks:
            running = asyncio.create_task(self._answer(number, task))
            self._tasks.add(running)
            running.add_done_callback(self._tasks.discard)

    async def collect(self) -> list[Answer]:
        """Wait until something is finished, and a little for more; all that is finished since the last call."""
        await self._answered.wait()
        await asyncio.sleep(GATHER_SECONDS)
        self._answered.clear()
        answers, self._answers = self._answers, []
        return answers

    async def _answer(self, number: int, task: bytes) -> None:
        try:
            answer: bytes | Exception = await self._run(task)
        except Exception as error:
            answer = portable(error)
        except (KeyboardInterrupt, SystemExit) as error:  # of a hook that wants an end: the manager waits for an answer
            answer = RolloutError(told(error))
        self._answers.append((number, answer))
        self._answered.set()

    async def _run(self, task: bytes) -> bytes:
        sample, params, evaluation = pickle.loads(task)
        with use_rollout_context(self._context):
            done = await self._runner.run(sample, params, evaluation)
        entry = journal_entry(done) if self._journaled and not evaluation else None
        try:
            return _packed(done, entry)
        except Exception:  # what a hook notes for logs may be anything
            done.notes = plain_notes(done.notes)
        try:
            return _packed(done, entry)
        except Exception as error:
            raise RolloutError(_why_it_stays(done, error)) from None

    def take_counts(self) -> Counts:
        searches = take_searches()  # before the step's metrics, which would make rates of them
        return Counts(*self._engine.take_prompt_tokens(), searches, drain_step_metrics())


def packed_task(sample: Sample, params: dict[str, Any], evaluation: bool) -> bytes:
    """A new sample, its sampling parameters, and whether it belongs to an evaluation."""
    return pickle.dumps((sample, params, evaluation), protocol=pickle.HIGHEST_PROTOCOL)


def unpacked(answer: bytes) -> tuple[Sample, bytes | None]:
    """The finished sample, and its entry in the journal if the run has one; RolloutError if it cannot be read."""
    try:
        found: tuple[Sample, bytes | None] = pickle.loads(answer)
    except Exception as error:  # whatever an object of a hook raises
        raise RolloutError(
            f"expected a finished sample from a rollout worker, found one that cannot be unpickled ({told(error)}); "
            "keep objects of your own out of it, or use --rollout-workers 1"
        ) from None
    return found


def _why_it_stays(sample: Sample, error: Exception) -> str:
    """A message about a finished sample that cannot be pickled."""
    fields = [item.name for item in dataclasses.fields(sample) if not _can_be_pickled(getattr(sample, item.name))]
    return (
        f"expected sample {sample.index} ({sample.where}) as one that can be pickled, since --rollout-workers runs its "
        f"hooks in another process; found {told(error)} (in its {', '.join(fields)}); keep such objects out of it "
        "(sample.report takes any), or use --rollout-workers 1"
    )


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # whatever the object raises
        return False
    return True


def _packed(sample: Sample, entry: bytes | None) -> bytes:
    return pickle.dumps((sample, entry), protocol=pickle.HIGHEST_PROTOCOL)
