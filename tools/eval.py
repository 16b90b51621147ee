"""Evaluates a model with a run's own hooks: exact match, F1, format, searches, times, with confidence intervals.

    python tools/eval.py --model data/demo/model --eval-prompt-data demo data/demo/test.parquet --apply-chat-template \\
        --corpus data/demo/corpus.jsonl.gz --limit 50 --output runs/eval/demo.jsonl

`--model` is a Hugging Face folder, a model of the hub, or a torch_dist checkpoint of a run. The engine is started, or a
running one named by --engine-url; the same holds for the retrieval server, with --corpus and --search-url. All flags of
train.py that concern data, hooks, engines and evaluation are taken as well. Every answer is a line of --output; the
numbers lie beside it (.json). Started again with the same flags, an evaluation goes on where it was interrupted.
`tools/analyse.py` compares two. Exits with 2 where the input is wrong, with 1 where the evaluation failed, and with 130
after ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import requests
from pydantic import Field, PositiveInt, model_validator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sleuth.arguments import Args, Group, check_files, check_tokenizer, parse_args
from sleuth.cluster.exported import weights_to_evaluate
from sleuth.cluster.preflight import ask_services, bare_questions, unwinnable_rows, with_hook_settings, with_model
from sleuth.data import PromptRow, load_rows
from sleuth.engine.key import engine_session
from sleuth.engine.server import EngineServer, EngineStartError
from sleuth.hooks import RolloutContext, StopRunError, drain_step_metrics, hook_modules, use_rollout_context
from sleuth.leftovers import remove_leftovers
from sleuth.metrics.rollout_metrics import evaluation_metrics, evaluation_name, overlong_wait
from sleuth.metrics.trajectories import spread
from sleuth.rollout.engine_client import EngineClient, embedding_size
from sleuth.rollout.hook_runner import load_hooks
from sleuth.rollout.loop import GenerationLoop, RolloutError
from sleuth.sample import Sample
from sleuth.secrets import redact
from sleuth.tokens import load_tokenizer
from tools.evaluation.answers import AnswerFile, settings_file
from tools.evaluation.models import find_model
from tools.evaluation.settings import digest_of, evaluation_settings
from tools.evaluation.summary import print_whole, summarize, table
from tools.evaluation.training import other_settings
from tools.servers import OF_THE_TRAINER, engine_troubles, one_line, retrieval_server, running_engines

LINE_SECONDS = 30.0
"""Where there is no terminal, a line tells the progress so often."""


class EvaluatedGroup(Group):
    """Evaluating a model"""

    model: str | None = Field(
        None,
        description="What is evaluated: a Hugging Face folder, a model of the hub (owner/name), or a torch_dist "
        "checkpoint [--load, else --hf-checkpoint].",
    )
    output: Path = Field(description="JSONL file of all answers; the numbers are written beside it, as .json.")
    limit: PositiveInt | None = Field(
        None, description="Most questions of each evaluation set, of each data source its share, always the same [all]."
    )
    batch_size: PositiveInt = Field(256, description="Most answers under way at the same time.")
    temperature: list[Annotated[float, Field(ge=0.0)]] | None = Field(
        None, description="Sampling temperatures; 0 is greedy. Outranks --eval-temperature [0]."
    )
    n_samples: PositiveInt | None = Field(
        None,
        description="Answers sampled for each question, for means and pass@k. Outranks --n-samples-per-eval-prompt "
        "[1].",
    )
    engine_url: list[str] | None = Field(
        None,
        description="SGLang servers that run already and serve the model, such as http://127.0.0.1:30000; their "
        "--api-key, if they have one, is read from SLEUTH_ENGINE_KEY [--rollout-num-gpus engines are started].",
    )
    corpus: Path | None = Field(
        None, description="Passages (.jsonl or .jsonl.gz) to start a retrieval server over [--search-url is asked]."
    )
    retriever_name: str = Field("bm25", description="Retriever of --corpus: bm25, or an encoder such as e5.")
    index_path: Path | None = Field(
        None, description="Index of --corpus, which an encoder needs [bm25: built in memory]."
    )


class EvaluatedArgs(Args, EvaluatedGroup):
    """The settings of a run, with defaults that let a few flags suffice."""

    colocate: bool = Field(True, description="No effect here: there is no trainer.")
    custom_generate_function_path: str | None = Field(
        "generate_with_search.generate", description="Generate hook, which makes one trajectory."
    )
    custom_rm_path: str | None = Field(
        "generate_with_search.reward_func", description="Reward hook, which scores one trajectory."
    )

    @model_validator(mode="before")
    @classmethod
    def _short_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = {**values, "eval_only": True}
        for short, name in (("temperature", "eval_temperature"), ("n_samples", "n_samples_per_eval_prompt")):
            if values.get(short) is not None:
                values[name] = values[short]
        if "hf_checkpoint" not in values:
            if not values.get("model"):
                raise ValueError("--model is required: a Hugging Face folder, owner/name, or a torch_dist checkpoint")
            values["hf_checkpoint"] = values["model"]
        pairs = values.get("eval_prompt_data")
        if not pairs:
            raise ValueError("--eval-prompt-data is required: what is evaluated, as NAME PATH [NAME PATH ...]")
        return {"prompt_data": pairs[-1], **values}  # which is not read


@dataclass(frozen=True, slots=True)
class Plan:
    """What is evaluated: checked arguments, and the rows of each set."""

    args: EvaluatedArgs
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    rows: dict[str, list[PromptRow]]
    settings: dict[str, Any]

    @property
    def answers(self) -> int:
        questions = sum(map(len, self.rows.values()))
        return questions * self.args.n_samples_per_eval_prompt * len(self.args.eval_temperature)


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        plan = prepare(parse_args(argv, model=EvaluatedArgs))
        samples = plan.args.n_samples_per_eval_prompt
        file = AnswerFile(plan.args.output, plan.settings, plan.tokenizer, samples)
    except (ValueError, OSError) as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return 130
    with file:
        try:
            results = answer(plan, file)
        except (StopRunError, RolloutError, EngineStartError) as error:
            return _fail(error, 1, _kept(file, plan))
        except (ValueError, OSError) as error:
            return _fail(error, 2)
        except KeyboardInterrupt:
            sys.stderr.write(f"interrupted: {_kept(file, plan)}\n")
            return 130
        file.finish(results)
        show(results, file.path)
    return 0


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _fail(error: Exception, code: int, more: str = "") -> int:
    sys.stderr.write(f"error: {redact(one_line(error))}{f'; {more}' if more else ''}\n")
    return code


def _kept(file: AnswerFile, plan: Plan) -> str:
    return f"{file.finished} of {plan.answers} answers are in {file.path}; the same command goes on from there"


def prepare(args: EvaluatedArgs) -> Plan:
    """Everything checked as before a run; ValueError or OSError for what a run would refuse, too."""
    if args.n_samples_per_eval_prompt > 1 and 0 in args.eval_temperature:
        raise ValueError(
            f"--n-samples {args.n_samples_per_eval_prompt} at temperature 0: expected a temperature above 0, since "
            "greedy answers are all the same; add --temperature 1"
        )
    if args.corpus is not None and args.search_url is not None:
        raise ValueError("expected --corpus, which starts a retrieval server, or --search-url, found both; drop one")
    if args.output.suffix != ".jsonl":
        raise ValueError(f"--output: expected a name that ends in .jsonl, found {args.output}; rename it")
    for url in args.engine_url or ():
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"--engine-url: expected an address such as http://127.0.0.1:30000, found {url}; correct it"
            )
    model = args.model or str(args.load or args.hf_checkpoint)
    hf_checkpoint = None if args.hf_checkpoint == args.model else args.hf_checkpoint
    folder, load = find_model(model, hf_checkpoint)
    args = args.model_copy(update=OF_THE_TRAINER | {"hf_checkpoint": folder, "load": load})
    modules = hook_modules(args)
    args = with_hook_settings(args, modules)
    check_files(args)
    args = with_model(args)
    tokenizer, vocab_size = load_tokenizer(args.hf_checkpoint), embedding_size(args.hf_checkpoint)
    check_tokenizer(tokenizer, vocab_size)
    rows = {name: load_rows(path, args, tokenizer, evaluation=True) for name, path in args.eval_sets.items()}
    if args.limit is not None:
        rows = {name: some_of(found, args.limit) for name, found in rows.items()}
    other = other_settings(args, folder)
    for warning in (*bare_questions(args, rows), *unwinnable_rows(args, modules), *([other] if other else [])):
        sys.stderr.write(f"warning: {warning}\n")
    return Plan(args, tokenizer, vocab_size, rows, evaluation_settings(args, model, rows, corpus_of(args)))


def some_of(rows: Sequence[PromptRow], limit: int) -> list[PromptRow]:
    """`limit` of the rows in their order, always the same: of each data source its share, from all parts of the file.

    They are every n-th row once rows of a source stand together. Of the file as it is they could be mostly of one
    source, where sources take turns.
    """
    by_source = sorted(range(len(rows)), key=lambda number: str(rows[number].metadata.get("data_source")))
    return [rows[number] for number in sorted(spread(by_source, limit))]


def corpus_of(args: EvaluatedArgs) -> dict[str, str] | None:
    """What a retrieval server of our own searches; ValueError if the corpus is not there."""
    if args.corpus is None:
        return None
    if not args.corpus.is_file():
        raise ValueError(f"--corpus: expected a .jsonl or .jsonl.gz file, found none at {args.corpus}; correct it")
    index = {} if args.index_path is None else {"index": digest_of(args.index_path)}
    return {"corpus": args.corpus.name, "content": digest_of(args.corpus), "retriever": args.retriever_name} | index


def answer(plan: Plan, file: AnswerFile) -> dict[str, Any]:
    """The missing answers, with the servers that they need; returns the results of all."""
    args = plan.args
    if file.has_all({name: len(rows) for name, rows in plan.rows.items()}, args.eval_temperature):
        sys.stderr.write(f"all {plan.answers} answers are in {file.path}\n")
        return asyncio.run(evaluate(plan, file, ["http://127.0.0.1:9"]))  # which is not asked
    if file.finished:
        sys.stderr.write(f"going on: {file.finished} of {plan.answers} answers are in {file.path}\n")
    remove_leftovers()
    with searching(args) as args, evaluated_model(args, file.path) as args, serving(args) as (urls, servers):
        plan = replace(plan, args=args)
        try:
            with progress(plan, file):
                return asyncio.run(evaluate(plan, file, urls))
        except StopRunError as error:
            if troubles := engine_troubles(servers):
                raise RolloutError("; ".join(troubles)) from error
            raise


@contextmanager
def searching(args: EvaluatedArgs) -> Iterator[EvaluatedArgs]:
    """The arguments with a search backend that answers; ValueError if it does not."""
    with contextlib.ExitStack() as stack:
        modules = hook_modules(args)
        if args.corpus is not None:
            url = stack.enter_context(retrieval_server(args.corpus, args.retriever_name, args.index_path))
            args = with_hook_settings(args.model_copy(update={"search_url": url}), modules)
        if args.search_check and (trouble := ask_services(args, modules)):
            raise ValueError(f"{trouble}, or start one over a file with --corpus")
        yield args


@contextmanager
def evaluated_model(args: EvaluatedArgs, output: Path) -> Iterator[EvaluatedArgs]:
    """The arguments with the weights as a Hugging Face folder; a checkpoint's is made beside the output meanwhile."""
    if args.engine_url or args.load is None:
        yield args
        return
    sys.stderr.write(f"converting the checkpoint in {args.load}\n")
    folder = output.with_suffix(".weights")
    try:
        with weights_to_evaluate(args, folder) as (converted, _):
            yield args.model_copy(update={"hf_checkpoint": converted.hf_checkpoint})
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextmanager
def serving(args: EvaluatedArgs) -> Iterator[tuple[list[str], list[EngineServer]]]:
    """The engines' URLs, and those engines that were started for it."""
    if args.engine_url:
        for url in args.engine_url:
            if other := other_model(url, args):
                sys.stderr.write(f"warning: {other}\n")
        yield args.engine_url, []
        return
    with running_engines(args) as servers:
        yield [server.url for server in servers], servers


def other_model(url: str, args: EvaluatedArgs) -> str | None:
    """A sentence, if a running engine says that it serves something else than the model."""
    try:
        with engine_session() as session:
            served = session.get(f"{url.rstrip('/')}/model_info", timeout=10.0).json()["model_path"]
    except (requests.RequestException, ValueError, KeyError, TypeError):
        return None  # the first question will tell
    if args.load is None and Path(served).resolve() == Path(args.hf_checkpoint).resolve():
        return None
    return f"the engine at {url} says that it serves {served}; the answers are noted as those of {args.model}"


async def evaluate(plan: Plan, file: AnswerFile, urls: list[str]) -> dict[str, Any]:
    """All sets at all temperatures, as in a run; returns the results. Raises EngineError if no engine answers."""
    args, started = plan.args, time.perf_counter()
    loop = GenerationLoop(args, load_hooks(args))
    evaluations: dict[str, Any] = {}
    async with EngineClient(
        urls,
        max_concurrency=args.rollout_max_concurrency,
        vocab_size=plan.vocab_size,
        timeout=args.engine_timeout,
    ) as client:
        with use_rollout_context(RolloutContext(client, plan.tokenizer, plan.vocab_size)):
            for name, rows in plan.rows.items():
                for temperature in args.eval_temperature:
                    answers, full_name = file.of(name, temperature), evaluation_name(name, temperature)
                    drain_step_metrics()
                    rollout = await loop.evaluate(
                        rows,
                        temperature,
                        f"evaluation {full_name}",
                        journal=answers,
                        at_once=args.batch_size,
                        on_failure=answers.failed,
                    )
                    failed = [sample for *place, sample in file.failed if place == [name, temperature]]
                    evaluations[full_name] = _results(full_name, rollout.samples, failed, drain_step_metrics())
    return {"evaluations": evaluations, "seconds": time.perf_counter() - started}


def _results(
    name: str, samples: Sequence[Sample], failed: Sequence[Sample], services: dict[str, float]
) -> dict[str, Any]:
    """`services`: what the hooks' services counted since this start, such as `search/latency_p95`."""
    if wait := overlong_wait(samples):
        sys.stderr.write(f"note: {name}: {wait}\n")
    metrics = evaluation_metrics(samples, name, failed) | {f"eval/{name}/{key}": v for key, v in services.items()}
    return {"failed": len(failed), "summary": summarize(samples, failed), "metrics": metrics}


@contextmanager
def progress(plan: Plan, file: AnswerFile) -> Iterator[None]:
    """In the block, show how many answers there are: a bar on a terminal, else a line now and then."""
    started, before = time.monotonic(), file.finished
    told = started
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("answers"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=plan.answers, completed=file.finished)

        def tell() -> None:
            nonlocal told
            bar.update(task, completed=file.finished)
            now = time.monotonic()
            if bar.disable and now - told >= LINE_SECONDS:
                told, rate = now, (file.finished - before) / (now - started)
                sys.stderr.write(f"{file.finished} of {plan.answers} answers, {rate:.2f} a second\n")

        file.on_record = tell
        yield


def show(results: dict[str, Any], output: Path) -> None:
    """The numbers as tables, and where they are."""
    console = Console()
    for name, found in results["evaluations"].items():
        failed = f", {found['failed']} trajectories failed and were generated anew" if found["failed"] else ""
        print_whole(console, table(f"{name}{failed} (in brackets: 95% intervals)", found["summary"]))
    console.print(f"answers: {output}; numbers: {settings_file(output)}", soft_wrap=True, markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
