"""Tokens a second of a training step, beside plain Hugging Face transformers with padding.

    python -m benchmarks.train_step [--sizes 2M 26M] [--samples 32] [--max-tokens 2048] [--trials 3] [--threads 1]
    python -m benchmarks.train_step --profile --sizes 26M        # where the time of our step goes

A step is GRPO as in the demo: reference log-probabilities, forward and backward with the KL loss and the entropy as
a metric, gradient clipping, AdamW. The samples have the lengths of trajectories of the demo's runs
(trajectories.json: prompt, then model and observation tokens in turn), random tokens and advantages. Ours packs them
into rows of at most --max-tokens. Reference: the same weights in transformers (scaled dot-product attention),
micro-batches of at most as many tokens with padding, in the order of arrival, logits of all positions, torch's
AdamW. A second reference sorts samples by length first, which leaves little padding. Loss, entropy and gradient norm
of all are compared before anything is timed.

Tokens are real ones, without padding. Times are medians over trials, in turn, of one process with --threads
threads; the processor time beside them is what to compare where other work keeps the machine busy. "floor" is the
time that the step's matrix products (6 x parameters x tokens for the policy, 2 x for the reference's forward pass,
logits of trained positions only) take at the speed of a large matrix product here. The last line is one JSON object;
its ratio is the least over sizes of tokens/s, ours / reference.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.options import whole_number
from sleuth.sample import TrainSample

SHAPES = Path(__file__).with_name("trajectories.json")
VOCABULARY = 4096
TOLERANCE = 1e-3
KL_COEF, CLIP_LOW, CLIP_HIGH = 0.001, 0.2, 0.28
ADAM = {"lr": 1e-4, "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.98}
SIZES: dict[str, dict[str, int]] = {
    "2M": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "26M": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
}


def make_samples(count: int) -> list[TrainSample]:
    rng = random.Random(0)
    shapes = rng.choices(json.loads(SHAPES.read_text(encoding="utf-8")), k=count)
    samples = []
    for shape in shapes:
        prompt, *segments = shape
        mask = [float(turn % 2 == 0) for turn, tokens in enumerate(segments) for _ in range(tokens)]
        tokens = [rng.randrange(VOCABULARY) for _ in range(sum(shape))]
        log_probs = [-rng.expovariate(3) * m for m in mask]
        samples.append(TrainSample(tokens, prompt, mask, log_probs, [rng.gauss(0, 1)] * len(mask)))
    return samples


def save_model(folder: Path, size: str) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=VOCABULARY, tie_word_embeddings=True, max_position_embeddings=2048, **SIZES[size])
    Qwen2ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


class Plain:
    """GRPO as one would write it with transformers."""

    def __init__(self, folder: Path, max_tokens: int, *, by_length: bool) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.frozen = copy.deepcopy(self.model).requires_grad_(False)
        self.max_tokens, self.by_length = max_tokens, by_length
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": ADAM["weight_decay"]},
                {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
            ],
            lr=ADAM["lr"],
            betas=(ADAM["adam_beta1"], ADAM["adam_beta2"]),
        )

    def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        batches = [_Padded.of(batch) for batch in self._micro_batches(samples)]
        with torch.no_grad():
            ref = [statistics(self.frozen, batch)[0] for batch in batches]
        self.optimizer.zero_grad()
        total = entropy = 0.0
        for batch, ref_log_probs in zip(batches, ref, strict=True):
            log_probs, log_p = statistics(self.model, batch)
            with torch.no_grad():
                entropy += (-(log_p.exp() * log_p).sum(-1) * batch.mask).sum(1).div(batch.mask.sum(1)).sum().item()
            del log_p
            loss = grpo_loss(log_probs, ref_log_probs, batch) / len(samples)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"train/loss": total, "train/grad_norm": float(norm), "train/entropy": entropy / len(samples)}

    def _micro_batches(self, samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
        batches: list[list[TrainSample]] = []
        for sample in sorted(samples, key=lambda s: len(s.token_ids)) if self.by_length else samples:
            longest = max(len(s.token_ids) for s in [*(batches[-1] if batches else []), sample])
            if not batches or longest * (len(batches[-1]) + 1) > self.max_tokens:
                batches.append([])
            batches[-1].append(sample)
        return batches


@dataclass(frozen=True)
class _Padded:
    """ids and attention [b, s]; mask and advantages [b, s - 1], of the tokens from the second on."""

    ids: Tensor
    attention: Tensor
    mask: Tensor
    advantages: Tensor

    @classmethod
    def of(cls, samples: Sequence[TrainSample]) -> _Padded:
        longest = max(len(s.token_ids) for s in samples)

        def rows(values: Callable[[TrainSample], list[Any]]) -> Tensor:
            return torch.tensor([values(s) + [0] * (longest - len(values(s))) for s in samples])

        return cls(
            rows(lambda s: s.token_ids),
            rows(lambda s: [1] * len(s.token_ids)),
            rows(lambda s: [0.0] * s.prompt_length + s.loss_mask)[:, 1:],
            rows(lambda s: [0.0] * s.prompt_length + s.advantages)[:, 1:],
        )


def statistics(model: Any, batch: _Padded) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens [b, s - 1] and of all words [b, s - 1, V]."""
    logits = model(input_ids=batch.ids, attention_mask=batch.attention, use_cache=False).logits[:, :-1]
    log_p = F.log_softmax(logits.float(), -1)
    return log_p.gather(-1, batch.ids[:, 1:, None]).squeeze(-1), log_p


def grpo_loss(log_probs: Tensor, ref_log_probs: Tensor, batch: _Padded) -> Tensor:
    """The sum over samples of the mean over trained tokens of the clipped surrogate and the KL loss (k3)."""
    ratio = (log_probs - log_probs.detach()).exp()
    surrogate = -torch.minimum(ratio * batch.advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * batch.advantages)
    difference = ref_log_probs - log_probs
    kl = (difference.exp() - 1 - difference).clamp(max=10)
    return ((surrogate + KL_COEF * kl) * batch.mask).sum(1).div(batch.mask.sum(1)).sum()


class Ours:
    """The product's trainer: one rank, in this process."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        from megatron.core import parallel_state

        from sleuth.arguments import parse_args
        from sleuth.megatron.convert import hf_to_torch_dist
        from sleuth.megatron.trainer import Trainer

        parallel_state.destroy_model_parallel()  # of the size before
        hf_to_torch_dist(folder, folder / "ref")

        words = f"""
            --hf-checkpoint {folder} --ref-load {folder}/ref --prompt-data unused.jsonl --custom-rm-path a.b
            --colocate --actor-num-gpus-per-node 1 --cpu-threads-per-actor {options.threads}
            --rollout-batch-size {options.samples // 8} --n-samples-per-prompt 8 --global-batch-size {options.samples}
            --use-dynamic-batch-size --max-tokens-per-gpu {options.max_tokens} --balance-data
            --use-kl-loss --kl-loss-coef {KL_COEF} --kl-loss-type low_var_kl
            --eps-clip {CLIP_LOW} --eps-clip-high {CLIP_HIGH} --clip-grad 1.0
        """.split()
        words += [word for name, value in ADAM.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        self.args = parse_args(words)
        self.trainer = Trainer(self.args)

    def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        from sleuth.rollout.train_batches import shard_batch

        (steps,) = shard_batch(self.args, list(samples))
        return self.trainer.train(steps)


def matmul_flops_per_second() -> float:
    """Of a large float32 matrix product with the threads in use."""
    a, b = torch.randn(2048, 1536), torch.randn(1536, 2048)
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return 2 * 2048 * 1536 * 2048 / min(seconds)


def step_flops(model: torch.nn.Module, samples: Sequence[TrainSample]) -> float:
    """Matrix products with weights that a step cannot do without (attention's own are left out).

    Two a weight and token in a forward pass; there are two, and the backward pass does twice as many as one.
    """
    embedding = VOCABULARY * model.config.hidden_size
    layers = sum(p.numel() for p in model.parameters() if p.dim() > 1) - embedding
    tokens = sum(len(s.token_ids) for s in samples)
    trained = sum(sum(s.loss_mask) for s in samples)
    return 2 * 4 * (layers * tokens + embedding * trained)


def check_equal(steps: dict[str, dict[str, float]]) -> dict[str, float]:
    """Raise unless all formulations found the same; returns the largest relative difference of each quantity."""
    expected = steps["reference"]
    differences = {}
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        found = [abs(step[name] - expected[name]) / abs(expected[name]) for step in steps.values()]
        differences[name] = max(found)
    if max(differences.values()) > TOLERANCE:
        raise SystemExit(f"the formulations differ by more than rounding: {steps}")
    return differences


def measure(size: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Tokens a second of every formulation, and what else is to be said about `size`."""
    save_model(folder, size)
    samples = make_samples(options.samples)
    engines = {
        "ours": Ours(folder, options),
        "reference": Plain(folder, options.max_tokens, by_length=False),
        "reference, sorted": Plain(folder, options.max_tokens, by_length=True),
    }
    torch.set_num_threads(options.threads)
    for _ in range(2):  # the second step's KL is not zero
        differences = check_equal({name: engine.step(samples) for name, engine in engines.items()})
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    cpu_seconds = copy.deepcopy(seconds)
    for _ in range(options.trials):
        for name, engine in engines.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            engine.step(samples)
            seconds[name].append(time.perf_counter() - start)
            cpu_seconds[name].append(time.process_time() - cpu_start)
    tokens = sum(len(sample.token_ids) for sample in samples)
    model = engines["reference"].model
    floor = step_flops(model, samples) / matmul_flops_per_second()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": tokens,
        "differences": differences,
        "tokens_per_second": {name: tokens / median(times) for name, times in seconds.items()},
        "seconds": {name: median(times) for name, times in seconds.items()},
        "cpu_seconds": {name: median(times) for name, times in cpu_seconds.items()},
        "floor_seconds": floor,
    }


OPERATORS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"),
    "attention": (
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "products, sums": (
        "aten::mul",
        "aten::mul_",
        "aten::add",
        "aten::add_",
        "aten::addcmul_",
        "aten::sub",
        "aten::sum",
    ),
    "exponentials, activations": ("aten::exp", "aten::exp_", "aten::silu", "aten::silu_backward"),
    "copies": ("aten::cat", "aten::copy_", "aten::index_select", "aten::fill_", "aten::zero_"),
}
"""Groups of operators in the profile; the rest is other operators, Python and autograd."""


def profile(size: str, options: argparse.Namespace, folder: Path) -> None:
    """Print what our step spends its time in, by groups of operators and by operator."""
    save_model(folder, size)
    samples = make_samples(options.samples)
    ours = Ours(folder, options)
    ours.step(samples)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        ours.step(samples)
    operators = {event.key: event for event in found.key_averages()}
    total = sum(event.self_cpu_time_total for event in operators.values())
    print(f"{size}: one step of {sum(len(s.token_ids) for s in samples)} tokens, {total / 1e6:.3f} s")
    for group, names in OPERATORS.items():
        print(f"  {group:28}{sum(operators[n].self_cpu_time_total for n in names if n in operators) / total:8.1%}")
    optimizer = sum(event.cpu_time_total for key, event in operators.items() if key.startswith("Optimizer.step"))
    print(f"  {'(the optimizer, in all)':28}{optimizer / total:8.1%}")
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=options.rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="sizes of the model to measure [all]"
    )
    parser.add_argument(
        "--samples", type=whole_number(multiple=8), default=32, help="samples of a step, a multiple of 8 [32]"
    )
    parser.add_argument(
        "--max-tokens", type=whole_number(), default=2048, help="tokens of a micro-batch, padding included [2048]"
    )
    parser.add_argument("--trials", type=whole_number(), default=3, help="timed steps of each formulation [3]")
    parser.add_argument("--threads", type=whole_number(), default=1, help="threads of torch [1]")
    parser.add_argument("--profile", action="store_true", help="print the operators of our step, measure nothing else")
    parser.add_argument("--rows", type=whole_number(), default=25, help="with --profile: operators to print [25]")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    results = {}
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            if options.profile:
                profile(size, options, Path(folder))
                continue
            results[size] = measure(size, options, Path(folder))
            report(size, results[size])
    if results:
        print(json.dumps(summary(results)))


def report(size: str, result: dict[str, Any]) -> None:
    print(f"{size}: {result['parameters']:,} parameters, {result['tokens']} tokens a step")
    print(f"  {'':20}{'tokens/s':>10}{'ours / this':>13}{'seconds':>10}{'of processors':>15}{'ours / this':>13}")
    for name, speed in result["tokens_per_second"].items():
        cpu_seconds = result["cpu_seconds"][name]
        print(
            f"  {name:20}{speed:10.0f}{result['tokens_per_second']['ours'] / speed:13.3f}"
            f"{result['seconds'][name]:10.3f}{cpu_seconds:15.3f}{cpu_seconds / result['cpu_seconds']['ours']:13.3f}"
        )
    print(f"  {'floor':20}{result['floor_seconds']:33.3f}")
    differences = ", ".join(f"{name} {value:.1e}" for name, value in result["differences"].items())
    print(f"  relative differences between the three: {differences}")


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    def ratios(quantity: str, reference: str) -> dict[str, float]:
        """Tokens a second, ours / reference, in time on the clock or of processors."""
        times = {size: result[quantity] for size, result in results.items()}
        return {size: round(found[reference] / found["ours"], 4) for size, found in times.items()}

    return {
        "name": "train_step: tokens a second, ours / transformers with padding",
        "ratio": min(ratios("seconds", "reference").values()),
        "ratios": ratios("seconds", "reference"),
        "ratios_to_sorted": ratios("seconds", "reference, sorted"),
        "cpu_ratios": ratios("cpu_seconds", "reference"),
        "cpu_ratios_to_sorted": ratios("cpu_seconds", "reference, sorted"),
    }


if __name__ == "__main__":
    main()
