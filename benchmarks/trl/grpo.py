"""GRPO by TRL's GRPOTrainer with the hooks, data and settings of one of our runs; `benchmarks.against_trl` starts it.

    python -m benchmarks.trl.grpo --run-dir RUN --search-url URL --output result.json [--threads 2]

It reads the settings of the run from RUN/config.yaml, so that both sides cannot differ in them. The conversations are
held by the same generate hook and scored by the same reward hook, through TRL's `rollout_func`; TRL's own `tools=`
speaks only tool calls of chat templates, which this model does not know. What generates is `model.generate` of
transformers: all conversations that wait are one batch, as in TRL's own loop over tool calls.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import json
import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from benchmarks.options import whole_number
from sleuth.arguments import Args, parse_args
from sleuth.data import PromptRow, PromptStream, load_rows
from sleuth.hooks import Generation, RolloutContext, use_rollout_context
from sleuth.metrics.rollout_metrics import evaluation_metrics, evaluation_name
from sleuth.rollout.hook_runner import load_hooks
from sleuth.rollout.loop import GenerationLoop
from sleuth.sample import Sample

MICRO_BATCHES = 4
"""Of a step: TRL pads all samples of one to the longest, and holds all their logits."""
QUIET_SECONDS = 0.01
"""Without a new request for so long, all trajectories wait, and a batch begins."""


class StopAt(StoppingCriteria):
    """Ends a sequence when the text of its last tokens holds a stop string; a token has at least one character."""

    def __init__(self, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.stop, self.tokenizer = tuple(stop), tokenizer
        self.tokens = max(map(len, self.stop))

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        new = input_ids[:, -1]
        ended = torch.zeros(len(new), dtype=torch.bool)
        for row in self._may_end(new).nonzero().flatten().tolist():
            text = self.tokenizer.decode(input_ids[row, -self.tokens :])
            ended[row] = any(stop in text for stop in self.stop)
        return ended

    def _may_end(self, new: torch.Tensor) -> torch.Tensor:
        """Which rows' new tokens hold the last character of a stop string: few, so that little is decoded."""
        if not hasattr(self, "_ending"):
            ends = {stop[-1] for stop in self.stop}
            words = self.tokenizer.batch_decode([[i] for i in range(len(self.tokenizer))])
            self._ending = torch.tensor([any(end in word for end in ends) for word in words])
        return self._ending[new]


class BatchedEngine:
    """An engine, as the hooks know it, over `model.generate`: requests that wait are generated in one batch."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._waiting: list[tuple[list[int], dict[str, Any], asyncio.Future[Generation]]] = []
        self._runner: asyncio.Task[None] | None = None
        self._stops: dict[tuple[str, ...], StopAt] = {}

    async def generate(self, input_ids: Sequence[int], sampling_params: dict[str, Any]) -> Generation:
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((list(input_ids), sampling_params, future))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        while self._waiting:
            count = 0
            while count != len(self._waiting):
                count = len(self._waiting)
                await asyncio.sleep(QUIET_SECONDS)
            batch, self._waiting = self._waiting, []
            rows = self._generate([ids for ids, _, _ in batch], [params for _, params, _ in batch])
            for row, (_, params, future) in zip(rows, batch, strict=True):
                future.set_result(self._parse(row, params))

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], params: list[dict[str, Any]]) -> list[list[int]]:
        """New ids of each prompt, with padding behind them. The prompts of a batch are sampled alike."""
        longest, first = max(map(len, prompts)), params[0]
        pad, sampled = self.tokenizer.pad_token_id, first["temperature"] > 0
        config = GenerationConfig(
            max_new_tokens=max(p["max_new_tokens"] for p in params),
            do_sample=sampled,
            **({"temperature": first["temperature"], "top_k": 0, "top_p": first["top_p"]} if sampled else {}),
            pad_token_id=pad,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        stop = self._stops.setdefault(tuple(first["stop"]), StopAt(first["stop"], self.tokenizer))
        training = self.model.training
        self.model.eval()
        output = self.model.generate(
            input_ids=torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts]),
            attention_mask=torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([stop]),
        )
        self.model.train(training)
        new: list[list[int]] = output[:, longest:].tolist()
        return new

    def _parse(self, ids: list[int], params: dict[str, Any]) -> Generation:
        ids = ids[: params["max_new_tokens"]]
        while len(ids) > 1 and ids[-1] == self.tokenizer.pad_token_id:
            ids.pop()
        text = self.tokenizer.decode(ids)
        ends = [text.index(stop) + len(stop) for stop in params["stop"] if stop in text]
        stopped = ends or ids[-1] == self.tokenizer.eos_token_id
        return Generation(ids, [0.0] * len(ids), text[: min(ends, default=None)], "stop" if stopped else "length")


class Side:
    """TRL's side of the comparison: its trainer, and our hooks over its model."""

    def __init__(self, args: Args, steps: int, output: Path) -> None:
        self.args = args
        self.tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
        self.model = AutoModelForCausalLM.from_pretrained(
            args.hf_checkpoint, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.engine = BatchedEngine(self.model, self.tokenizer)
        self.loop = GenerationLoop(args, load_hooks(args))
        self.asyncio = asyncio.Runner()
        rows = load_rows(args.prompt_data, args, self.tokenizer)
        stream = PromptStream(rows, seed=args.seed, shuffle=args.rollout_shuffle)
        self.rows = stream.next_rows(steps * args.rollout_batch_size)  # those of our run, in its order
        self.ended: list[float] = []
        self.trainer = GRPOTrainer(
            model=self.model,
            processing_class=self.tokenizer,
            reward_funcs=given_reward,
            args=self._config(steps, output),
            # The hook gets the rendered prompt of the row, so that TRL need not know more than its number.
            train_dataset=Dataset.from_dict({"prompt": [str(index) for index in range(len(self.rows))]}),
            rollout_func=self.rollout,
            callbacks=[_Clock(self.ended)],
        )

    def _config(self, steps: int, output: Path) -> GRPOConfig:
        args = self.args
        samples = args.rollout_batch_size * args.n_samples_per_prompt
        return GRPOConfig(
            output_dir=str(output),
            max_steps=steps,
            per_device_train_batch_size=samples // MICRO_BATCHES,
            gradient_accumulation_steps=MICRO_BATCHES,
            num_generations=args.n_samples_per_prompt,
            shuffle_dataset=False,
            beta=args.kl_loss_coef if args.use_kl_loss else 0.0,
            loss_type="grpo",  # the mean over samples of means over tokens, as ours
            scale_rewards="none" if args.disable_grpo_std_normalization else "group",
            epsilon=args.eps_clip,
            epsilon_high=args.eps_clip_high,
            temperature=args.rollout_temperature,
            learning_rate=args.lr,
            lr_scheduler_type="polynomial",  # of power 1: ours is linear, down to --min-lr
            lr_scheduler_kwargs={"power": 1.0, "lr_end": args.min_lr},
            weight_decay=args.weight_decay,
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            max_grad_norm=args.clip_grad,
            gradient_checkpointing=False,  # it saves memory, of which there is enough, for time
            bf16=False,
            use_cpu=True,
            seed=args.seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )

    def rollout(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's `rollout_func`: the conversations of a step, each prompt so often in a row as it has samples."""
        size = self.args.n_samples_per_prompt
        rows = [self.rows[int(prompt)] for prompt in prompts[::size]]
        rollout = self._run(self.loop.rollout(lambda count: rows[:count]))
        samples: list[Sample] = rollout.samples
        return {
            "prompt_ids": [sample.trace.prompt_ids for sample in samples],
            "completion_ids": [sample.trace.response_ids for sample in samples],
            "env_mask": [[int(value) for value in sample.trace.loss_mask] for sample in samples],
            "logprobs": None,
            "our_reward": [sample.reward for sample in samples],
        }

    def evaluate(self) -> dict[str, float]:
        """Our evaluation, of TRL's model."""
        metrics: dict[str, float] = {}
        for name, path in self.args.eval_sets.items():
            rows: list[PromptRow] = load_rows(path, self.args, self.tokenizer, evaluation=True)
            for temperature in self.args.eval_temperature:
                done = self._run(self.loop.evaluate(rows, temperature))
                metrics |= evaluation_metrics(done.samples, evaluation_name(name, temperature), done.failed)
        return metrics

    def _run(self, coroutine: Any) -> Any:
        with use_rollout_context(RolloutContext(self.engine, self.tokenizer, self.model.config.vocab_size)):
            return self.asyncio.run(coroutine, context=contextvars.copy_context())


class _Clock(TrainerCallback):
    """Notes when each step ended."""

    def __init__(self, ended: list[float]) -> None:
        self.ended = ended

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ended.append(time.perf_counter())


def given_reward(our_reward: list[float], **kwargs: Any) -> list[float]:
    """What our reward hook gave; it has scored each sample already."""
    return our_reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True, help="the run whose settings hold")
    parser.add_argument(
        "--search-url", required=True, help="the retrieval server, since that of the run may have ended"
    )
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--threads", type=whole_number(), default=os.cpu_count(), help="torch's threads [all cores]")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    args = parse_args(
        ["--custom-config-path", str(options.run_dir / "config.yaml"), "--search-url", options.search_url]
    )
    side = Side(args, args.num_rollout, options.output.with_suffix(""))
    start = time.perf_counter()
    side.trainer.train()
    result = {
        "step_seconds": [end - begin for begin, end in pairwise([start, *side.ended])],
        "evaluation": side.evaluate(),
        "versions": {name: version(name) for name in ("trl", "transformers", "torch", "accelerate")},
        "threads": options.threads,
    }
    options.output.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
