"""Tiny models, samples with known losses, a plain torch reference, and processes to run the trainer in."""

from __future__ import annotations

import io
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.multiprocessing as mp

from sleuth.arguments import Args, parse_args
from sleuth.sample import TrainSample

VOCABULARY = 96
TIMEOUT_SECONDS = 600.0


def save_tiny_model(folder: Path, kind: str, *, tied: bool = False, seed: int = 0, **changes: Any) -> Path:
    """Write a random model whose norms and biases are not trivial; returns its folder."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    } | changes
    names = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "llama": "Llama"}
    if kind.startswith("qwen3"):
        settings.setdefault("head_dim", 12)  # not hidden_size / heads
    config = getattr(transformers, names[kind] + "Config")(**settings)
    torch.manual_seed(seed)
    model = getattr(transformers, names[kind] + "ForCausalLM")(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(4)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")  # a model's folder is expected to have one; nothing here reads it
    return folder


def load_hf(folder: Path | str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # type: ignore[no-any-return]


def make_args(folder: Path | str, world: int = 1, **flags: Any) -> Args:
    """Real arguments for a trainer of `world` processes; a flag's value may be a bool, a number or a path."""
    words = ["--hf-checkpoint", str(folder), "--prompt-data", "unused.jsonl", "--actor-num-gpus-per-node", str(world)]
    defaults: dict[str, Any] = {"lr": 1e-2, "adam_eps": 1e-4, "weight_decay": 0.1, "cpu_threads_per_actor": 1}
    if flags.get("loss_type") != "sft":
        defaults |= {"colocate": True, "custom_rm_path": "a.b", "n_samples_per_prompt": 4}
    defaults |= {"rollout_batch_size": 3 if "colocate" in defaults else 12}
    for name, value in (defaults | flags).items():
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [] if value is False else [flag, str(value)]
    return parse_args(words)


LOGGED = {0, 1, 2, 7, 11}
"""Places of the samples of `make_samples` whose log-probabilities are kept; sample 1 has no trained token."""


def make_samples(count: int = 12, *, sft: bool = False, seed: int = 0) -> list[TrainSample]:
    """Ragged samples with observations inside, in groups of four, with every odd thing that a step may hold.

    Sample 1 has no trained token, sample 2 trains only its last token, sample 3 has a response of one token, and all
    rewards of the third group are equal: its advantages are 0.
    """
    rng = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=rng))

    samples = []
    for index in range(count):
        length, prompt = integer(9, 30), 1 if sft else integer(1, 6)
        if index == 3:
            prompt = length - 1
        response = length - prompt
        mask = (torch.rand(response, generator=rng) > 0.3).float()
        if index == 1:
            mask.zero_()
        if index in (2, 3):
            mask.zero_()[-1] = 1.0
        if sft:
            mask *= 1.0 + (index % 3) * 0.5
        advantage = float(torch.randn(1, generator=rng)) * (index // 4 != 2)
        samples.append(
            TrainSample(
                torch.randint(0, VOCABULARY, (length,), generator=rng).tolist(),
                prompt,
                mask.tolist(),
                [] if sft else (-4.5 + torch.randn(response, generator=rng)).mul(mask).tolist(),
                [] if sft else [advantage] * response,
                reward=advantage,
                index=index,
            )
        )
    return samples


def hf_statistics(model: torch.nn.Module, sample: TrainSample, temperature: float) -> torch.Tensor:
    """Log-probability, entropy and mean log-probability [R, 3] of a sample's response tokens."""
    ids = torch.tensor(sample.token_ids)
    log_p = torch.log_softmax(model(ids[None]).logits[0].float() / temperature, -1)[:-1]
    chosen = log_p.gather(1, ids[1:, None]).squeeze(1)
    stacked = torch.stack([chosen, -(log_p.exp() * log_p).sum(1), log_p.mean(1)], 1)
    return stacked[sample.prompt_length - 1 :]


class Reference:
    """The same training in plain torch: one sample at a time, no packing, no parallelism."""

    def __init__(self, args: Args, reference_folder: Path | None = None) -> None:
        self.args = args
        self.model = load_hf(args.hf_checkpoint)
        self.frozen = load_hf(reference_folder or args.hf_checkpoint)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        self.log_probs: dict[int, torch.Tensor] = {}
        """Of the samples of the last `train`, by their index, before its updates."""
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=args.lr,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
        )

    def train(self, steps: Sequence[list[TrainSample]]) -> list[dict[str, float]]:
        temperature = self.args.rollout_temperature
        with torch.no_grad():
            old = {id(s): hf_statistics(self.model, s, temperature)[:, 0] for step in steps for s in step}
            self.log_probs = {s.index: old[id(s)] for step in steps for s in step}
            ref = {id(s): hf_statistics(self.frozen, s, temperature)[:, 0] for step in steps for s in step}
        if self.args.kl_coef:
            self._penalise([s for step in steps for s in step], old, ref)
        return [self._step(step, old, ref) for step in steps]

    def _penalise(self, samples: list[TrainSample], old: dict[int, Any], ref: dict[int, Any]) -> None:
        """Advantages of the rewards minus the KL penalty, normalised in groups of four."""
        for first in range(0, len(samples), 4):
            group = samples[first : first + 4]
            divergences = [((old[id(s)] - ref[id(s)]) * torch.tensor(s.loss_mask)).sum().item() for s in group]
            rewards = np.array([s.reward - self.args.kl_coef * kl for s, kl in zip(group, divergences, strict=True)])
            spread = rewards.std(ddof=1)
            for sample, reward in zip(group, rewards, strict=True):
                advantage = (reward - rewards.mean()) / (spread + 1e-6) if spread else 0.0
                sample.advantages[:] = [advantage] * len(sample.advantages)

    def _step(self, samples: list[TrainSample], old: dict[int, Any], ref: dict[int, Any]) -> dict[str, float]:
        args = self.args
        self.optimizer.zero_grad()
        tokens = sum(sum(s.loss_mask) for s in samples)
        per_token = args.loss_type == "sft" or args.calculate_per_token_loss
        totals: dict[str, torch.Tensor] = {}
        for sample in samples:
            mask = torch.tensor(sample.loss_mask)
            if not mask.any():
                continue
            if args.loss_type == "sft":
                chosen, _, mean = hf_statistics(self.model, sample, 1.0).unbind(1)
                loss = -(1 - args.label_smoothing) * chosen - args.label_smoothing * mean
                values = {"loss": loss, "nll": -chosen}
            else:
                values = self._policy(sample, old[id(sample)], ref[id(sample)])
            for name, value in values.items():
                share = (value * mask).sum() / (tokens if per_token else mask.sum() * len(samples))
                totals[name] = totals.get(name, torch.zeros(())) + share
        totals["loss"].backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), args.clip_grad or torch.inf))
        self.optimizer.step()
        return {name: float(total.detach()) for name, total in totals.items()} | {"grad_norm": norm}

    def _policy(self, sample: TrainSample, old: torch.Tensor, ref: torch.Tensor) -> dict[str, torch.Tensor]:
        args = self.args
        chosen, entropy, _ = hf_statistics(self.model, sample, args.rollout_temperature).unbind(1)
        advantage = torch.tensor(sample.advantages)
        ratio = (chosen - old).exp()
        bounded = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
        value = -torch.minimum(ratio * advantage, bounded * advantage)
        if args.use_tis:
            importance = (old - torch.tensor(sample.rollout_log_probs)).exp().clamp(args.tis_clip_low, args.tis_clip)
            value = value * importance
        values = {"pg_loss": value, "entropy": entropy, "ratio_mean": ratio, "ppo_kl": old - chosen}
        if args.use_kl_loss:
            values["kl_loss"] = (ref - chosen).exp() - 1 - (ref - chosen)
            value = value + args.kl_loss_coef * values["kl_loss"]
        return values | {"loss": value - args.entropy_coef * entropy}

    def gradients(self) -> dict[str, torch.Tensor]:
        found = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        return separate_experts(found)

    def weights(self) -> dict[str, torch.Tensor]:
        return separate_experts({name: p.detach().clone() for name, p in self.model.named_parameters()})


def separate_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Transformers stacks the experts of a layer in memory; files, and the trainer, name each."""
    found: dict[str, torch.Tensor] = {}
    for name, stacked in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(stacked):
                for part, matrix in zip(("gate", "up"), both.chunk(2), strict=True):
                    found[name.replace("gate_up_proj", f"{expert}.{part}_proj.weight")] = matrix
        elif name.endswith("experts.down_proj"):
            for expert, matrix in enumerate(stacked):
                found[name.replace("down_proj", f"{expert}.down_proj.weight")] = matrix
        else:
            found[name] = stacked
    return found


@dataclass(frozen=True)
class Task:
    """A function of this module or a test module to run on every rank: `function(rank, world, **arguments)`."""

    function: Callable[..., Any]
    arguments: dict[str, Any] = field(default_factory=dict)


def run_tasks(world: int, tasks: Sequence[Task]) -> list[list[Any]]:
    """Run tasks one after the other in `world` processes: `results[task][rank]`. Errors raise with their traceback."""
    context = mp.get_context("spawn")
    results = context.Queue()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    processes = [context.Process(target=_worker, args=(rank, world, port, tasks, results)) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        return _collect(results, processes, world, len(tasks))
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(results: Any, processes: Sequence[Any], world: int, count: int) -> list[list[Any]]:
    collected: list[list[Any]] = [[None] * world for _ in range(count)]
    waiting, deadline = world * count, time.monotonic() + TIMEOUT_SECONDS
    while waiting:
        try:
            number, rank, value, error = results.get(timeout=2)
        except Empty:
            if time.monotonic() > deadline or not any(process.is_alive() for process in processes):
                raise TimeoutError(f"{waiting} results are missing after {TIMEOUT_SECONDS} s") from None
            continue
        if error:
            for process in processes:
                process.kill()
            raise RuntimeError(f"task {number} failed on rank {rank}:\n{error}")
        collected[number][rank] = torch.load(io.BytesIO(value), weights_only=False)
        waiting -= 1
    return collected


def _to_bytes(value: Any) -> bytes:
    """A queue would pass tensors as shared memory, which dies with the process that made them."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _worker(rank: int, world: int, port: int, tasks: Sequence[Task], results: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    for number, task in enumerate(tasks):
        try:
            value = task.function(rank, world, **task.arguments)
            results.put((number, rank, _to_bytes(value), None))
        except BaseException:
            results.put((number, rank, None, traceback.format_exc()))
            results.close()
            results.join_thread()
            sys.exit(1)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def new_trainer(args: Args) -> Any:
    """A trainer in a process that may have had one before, in another layout."""
    from megatron.core import parallel_state

    from sleuth.megatron.trainer import Trainer

    parallel_state.destroy_model_parallel()
    return Trainer(args)


def shares(trainer: Any, args: Args, samples: list[TrainSample], **plan: Any) -> Any:
    """This rank's optimizer steps."""
    from sleuth.algo.context_parallel import length_multiple
    from sleuth.algo.optimizer_steps import plan_optimizer_steps

    plan = plan or {"micro_batch_size": 2}
    ranks = plan_optimizer_steps(
        samples,
        global_batch_size=args.global_batch_size,
        num_ranks=trainer.data_parallel_size,
        pad_multiple=length_multiple(args),
        **plan,
    )
    return ranks[trainer.data_parallel_rank]


def train_task(
    rank: int, world: int, folder: str, flags: dict[str, Any], plan: dict[str, Any], sft: bool = False
) -> dict[str, Any]:
    """Score, then train four optimizer steps: one, and three in one call. Everything that can be compared."""
    from sleuth.megatron.forward import score

    args = make_args(folder, world, **flags)
    trainer = new_trainer(args)
    samples = _as_given(make_samples(sft=sft), args)
    out: dict[str, Any] = {"log_probs": trainer.log_probs(samples[0].token_ids, args.rollout_temperature)}
    one = args.model_copy(update={"global_batch_size": 12})
    first = shares(trainer, one, samples, **plan)
    out["trained tokens"] = [_trained_tokens(batch, first[0], args) for batch in first[0].micro_batches]
    with mock.patch("sleuth.megatron.trainer.score", side_effect=score) as scored:
        out["first"] = untimed(trainer.train(first))
    out["passes"] = scored.call_count
    out["first logged"] = trainer.logged_log_probs
    out["first gradients"] = gradients(trainer)
    three = args.model_copy(update={"global_batch_size": 4})
    out["later"] = untimed(
        trainer.train(shares(trainer, three, _as_given(make_samples(sft=sft, seed=1), args), **plan))
    )
    out["later logged"] = trainer.logged_log_probs
    out["later gradients"] = gradients(trainer)
    out["weights"] = dict(trainer.hf_weights())
    return out


def _as_given(samples: list[TrainSample], args: Any) -> list[TrainSample]:
    """As the rollout gives them: with a KL penalty in the reward the trainer makes the advantages; some are logged."""
    given = [replace(sample, logged=sample.index in LOGGED) for sample in samples]
    return [replace(sample, advantages=[]) for sample in given] if args.kl_coef else given


def untimed(metrics: Any) -> Any:
    """Metrics without those that are seconds, which no two runs share; what is no dictionary is passed on."""
    if not isinstance(metrics, dict):
        return metrics
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "perf/"))}


def gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """This pipeline stage's, after clipping; {} under the distributed optimizer, where no rank has them whole."""
    if trainer.args.use_distributed_optimizer:
        return {}
    return dict(trainer.weights.stage_tensors(lambda p: p.main_grad.clone()))


def _trained_tokens(samples: list[TrainSample], step: Any, args: Args) -> int:
    """How many trained tokens of a micro-batch this context-parallel rank holds."""
    from sleuth.algo.context_parallel import length_multiple
    from sleuth.megatron.forward import MicroBatch

    return len(MicroBatch.build(samples, step, multiple=length_multiple(args), per_token=False).selected)
