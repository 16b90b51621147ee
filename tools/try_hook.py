"""Tries hooks on a few rows of data, in seconds: no Ray, no trainer.

    python tools/try_hook.py --custom-generate-function-path my_hook.generate --custom-rm-path my_hook.reward_func \\
        --prompt-data train.parquet --scripted answers.yaml

It prints each trajectory with what is trained on, the reward with its components, the hook's notes, and every error
with the lines of your own files. The model's words come from

    --scripted answers.yaml   a list of turns, said in every row; or a list of such lists, one a row
    --engine-url URL          an SGLang server that runs already
    neither                   an engine of its own, which serves --hf-checkpoint; it starts in half a minute

Flags of train.py are taken as well, so a run's whole command line can be tried. Exits with 2 where the input is wrong,
with 1 where a sample failed.
"""

from __future__ import annotations

import asyncio
import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import Field, PositiveInt
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sleuth.arguments import Args, Group, check_files, check_tokenizer, parse_args
from sleuth.cluster.preflight import ask_services, bare_questions, with_hook_settings, with_model
from sleuth.data import PromptRow, load_rows
from sleuth.data_path import DataPath
from sleuth.engine.server import EngineStartError
from sleuth.hooks import (
    Engine,
    FailSample,
    RolloutContext,
    StopRunError,
    drain_step_metrics,
    hook_modules,
    use_rollout_context,
)
from sleuth.hooks.testing import ScriptedEngine
from sleuth.metrics.trajectories import trajectory_record
from sleuth.rollout.engine_client import EngineClient, EngineError, embedding_size
from sleuth.rollout.hook_runner import UNUSABLE, HookRunner, load_hooks
from sleuth.rollout.loop import fresh_sample, rollout_parameters
from sleuth.rollout.user_code import user_traceback
from sleuth.sample import Sample, SampleStatus
from sleuth.secrets import redact
from sleuth.tokens import load_tokenizer
from tools.servers import OF_THE_TRAINER, one_line, running_engines
from tools.view_trajectories import render

DEMO_MODEL = Path(__file__).resolve().parent.parent / "data/demo/model"
ROWS = 4
NO_REWARD = "sleuth.hooks.testing.no_reward"


class TryGroup(Group):
    """Trying hooks"""

    rows: PositiveInt | None = Field(
        None, description=f"Rows of --prompt-data to try [{ROWS}, or one for each list in --scripted]."
    )
    scripted: Path | None = Field(
        None, description="YAML file of what the model says: a list of turns, or a list of such lists, one a row."
    )
    engine_url: str | None = Field(
        None,
        description="SGLang server that runs already, such as http://127.0.0.1:30000; its --api-key, if it has one, "
        "is read from SLEUTH_ENGINE_KEY [one is started].",
    )


class TryArgs(Args, TryGroup):
    """The settings of a run, with defaults that let a few flags suffice."""

    hf_checkpoint: str = Field(
        str(DEMO_MODEL),
        description="Folder of the Hugging Face model; with --scripted its tokenizer and config suffice.",
    )
    colocate: bool = Field(True, description="No effect here: there is no trainer.")
    custom_rm_path: str | None = Field(NO_REWARD, description="The reward hook [none: every reward is 0].")


@dataclass(frozen=True, slots=True)
class Trial:
    """What is tried: the resolved arguments, and rows with what the model says in them (None: what it wants)."""

    args: TryArgs
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    rows: list[PromptRow]
    scripts: list[list[str]] | None

    @property
    def samples(self) -> list[Sample]:
        return [fresh_sample(row, number, number) for number, row in enumerate(self.rows)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A sample, and what a hook raised on it."""

    sample: Sample
    error: BaseException | None


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        trial = prepare(parse_args(argv, model=TryArgs))
        with engine_of(trial.args) as url:
            outcomes = asyncio.run(run(trial, url))
    except (ValueError, OSError, EngineError, EngineStartError) as error:
        sys.stderr.write(f"error: {redact(one_line(error))}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    report(outcomes, trial)
    return int(any(outcome.sample.status in UNUSABLE for outcome in outcomes))


def prepare(args: TryArgs) -> Trial:
    """Everything checked as before a run; ValueError or OSError for what a run would refuse, too."""
    if args.loss_type == "sft":
        raise ValueError("--loss-type sft: supervised training runs no hooks, so there is nothing to try; drop it")
    if args.scripted and args.engine_url:
        raise ValueError("expected --scripted or --engine-url, found both; drop one of them")
    args = args.model_copy(update=OF_THE_TRAINER | {"load": None})
    modules = hook_modules(args)
    args = with_hook_settings(args, modules)
    check_files(args)
    args = with_model(args)
    tokenizer, vocab_size = load_tokenizer(args.hf_checkpoint), embedding_size(args.hf_checkpoint)
    check_tokenizer(tokenizer, vocab_size)
    scripts = read_scripts(args.scripted, args.rows) if args.scripted else None
    rows = read_rows(args, tokenizer, len(scripts) if scripts else args.rows or ROWS)
    for warning in bare_questions(args, {args.prompt_data: rows}):
        sys.stderr.write(f"warning: {warning}\n")
    if args.search_check and (trouble := ask_services(args, modules)):
        raise ValueError(trouble)
    return Trial(args, tokenizer, vocab_size, rows, scripts)


def read_scripts(path: Path, rows: int | None) -> list[list[str]]:
    """What the model says, turn by turn, in each row. ValueError for a file that does not say it."""
    try:
        script = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(
            f"--scripted: expected a readable YAML file, found {path} ({' '.join(str(error).split())}); correct it"
        ) from None
    if not isinstance(script, list) or not script:
        raise ValueError(
            f"--scripted: expected a list of turns, or a list of such lists, one a row, found {script!r:.80} in {path}"
        )
    by_row = all(isinstance(turns, list) for turns in script)
    if by_row and rows is not None and rows > len(script):
        raise ValueError(f"--scripted: expected a list for each of {rows} rows, found {len(script)}; lower --rows")
    scripts = script[:rows] if by_row else [script] * (rows or ROWS)
    for turn in (turn for turns in scripts for turn in turns):
        if not isinstance(turn, str):
            raise ValueError(
                f"--scripted: expected turns of text in {path}, found {turn!r:.80} ({type(turn).__name__}); put it in "
                "quotes"
            )
    return scripts


def read_rows(args: TryArgs, tokenizer: PreTrainedTokenizerBase, count: int) -> list[PromptRow]:
    """The first rows; where nothing else selects them, no others are read."""
    path = args.prompt_data
    if DataPath.parse(path).rows == slice(None) and not args.data_source_filter:
        path = f"{path}@[0:{count}]"
    return load_rows(path, args, tokenizer)[:count]


@contextmanager
def engine_of(args: TryArgs) -> Iterator[str | None]:
    """The URL of an engine: the one that is named, or one that runs for as long as this does; None for a script."""
    if args.scripted or args.engine_url:
        yield args.engine_url
        return
    with running_engines(args.model_copy(update={"rollout_num_gpus": args.rollout_num_gpus_per_engine})) as servers:
        yield servers[0].url


async def run(trial: Trial, url: str | None) -> list[Outcome]:
    """All rows at once, as in a run. Raises EngineError if no engine answers at `url`."""
    if url is None:
        scripts = trial.scripts or []
        return await _run_with(trial, [ScriptedEngine(trial.tokenizer, turns) for turns in scripts])
    args = trial.args
    async with EngineClient(
        [url],
        max_concurrency=args.rollout_max_concurrency,
        vocab_size=trial.vocab_size,
        attempts=1,
        timeout=args.engine_timeout,
    ) as client:
        await client.score([0])  # so that a wrong URL is not told once for each sample
        return await _run_with(trial, [client] * len(trial.rows))


async def _run_with(trial: Trial, engines: Sequence[Engine]) -> list[Outcome]:
    """The hooks on every row, `engines[i]` speaking in row i."""
    errors: dict[int, BaseException] = {}

    def note(sample: Sample, error: BaseException) -> None:
        errors[sample.index] = error

    runner = HookRunner(trial.args, load_hooks(trial.args), on_error=note)
    params = rollout_parameters(trial.args)

    async def run_one(sample: Sample, engine: Engine) -> Outcome:
        with use_rollout_context(RolloutContext(engine, trial.tokenizer, trial.vocab_size)):
            try:
                sample = await runner.run(sample, params, evaluation=False)
            except StopRunError as error:
                errors[sample.index] = error
                sample.status, sample.error = SampleStatus.FAILED, f"this would end a run: {error}"
        return Outcome(sample, errors.get(sample.index))

    with runner.watching("trial", len(trial.samples)):
        return await asyncio.gather(*map(run_one, trial.samples, engines))


def report(outcomes: Sequence[Outcome], trial: Trial) -> None:
    """Trajectories with their masks, rewards and notes, and what went wrong, for a person to read."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the terminal's encoding lacks becomes a question mark
    console = Console()
    for outcome in outcomes:
        console.print(render(trajectory_record(outcome.sample, trial.tokenizer)))
        if outcome.error is not None and not isinstance(outcome.error, FailSample):
            console.print(Text(user_traceback(outcome.error), style="red"), soft_wrap=True)
    usable = [outcome.sample for outcome in outcomes if outcome.sample.status not in UNUSABLE]
    rewards = [sample.reward for sample in usable if sample.reward is not None]
    mean = f", mean reward: {sum(rewards) / len(rewards):.3f}" if rewards else ""
    unscored = " (no --custom-rm-path: nothing is scored)" if trial.args.custom_rm_path == NO_REWARD else ""
    counted = ", ".join(f"{name} {value:.3g}" for name, value in drain_step_metrics().items() if value)
    for line in filter(
        None, (f"trajectories: {len(outcomes)}, failed: {len(outcomes) - len(usable)}{mean}{unscored}", counted)
    ):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
