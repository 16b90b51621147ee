"""What large layouts take on each GPU: memory, and the bytes that it receives in a step.

Memory is the plan's (`sleuth.memory_plan`), which `tests/fake_cuda` holds to the real trainer on fake GPUs. Traffic is
worked out from what the trainer does, each collective over n GPUs being a ring: of S bytes in all, a GPU receives
S (n - 1) / n for a gather or a reduction that is scattered.

    gradients  fp32, reduced and scattered over the replicas of a parameter, then bf16 weights gathered, once for each
               optimizer step; an expert has other replicas than the rest
    TP         a layer's T tokens of h values in bf16, 2 h T: attention gathers and scatters them once each forward
               pass, and moves them three times backward; so does a feed-forward layer, but no mixture of experts
    CP         keys and values of the other ranks' tokens each forward pass, their gradients once
    PP         2 h T / t from the stage before each forward pass (none for recomputation), gradients once
    EP         each of T / t tokens to k experts and back, 4 h k, each forward pass, and once more backward
    sync       all weights, bf16, but those that the GPU has: colocated, every rank has every bucket for a moment

T: tokens of a step for a GPU's data- and context-parallel rank. Forward passes: the policy's, again where layers are
recomputed, and the reference's. Embedding, output layer and log-probabilities are left out: less than a layer's.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sleuth.arguments import Args, check_model, parse_args, read_hf_config
from sleuth.memory_plan import BF16, FP32, GB, expert_parameters, gpu_bytes, memory_plan, num_parameters, turns
from tests.published_configs import PUBLISHED

GPU_GB = 141.0
LONGEST, MEAN_TOKENS = 8192, 2048
"""Tokens of a trajectory."""
LARGER = {"num_hidden_layers": 94, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 64}
MODELS: dict[str, dict[str, Any]] = {
    "30B-A3B": PUBLISHED["qwen3-30B-A3B"],
    "235B-A22B": PUBLISHED["qwen3-30B-A3B"] | LARGER | {"moe_intermediate_size": 1536},
}
SAMPLES = 4096
"""Trajectories of a step, in four optimizer steps."""
KINDS = ("gradients", "TP", "CP", "PP", "EP", "sync")
BATCH = f"--rollout-batch-size {SAMPLES // 8} --n-samples-per-prompt 8 --global-batch-size {SAMPLES // 4}"
COMMON = (
    f"--sequence-parallel --use-distributed-optimizer --use-dynamic-batch-size --max-tokens-per-gpu {LONGEST} "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    f"--rollout-max-context-len {LONGEST} --rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 {BATCH}"
)


@dataclass(frozen=True)
class Layout:
    """A model of `MODELS` on so many GPUs: tensor, pipeline, context and expert parallel sizes."""

    model: str
    gpus: int
    tensor: int
    pipeline: int
    context: int
    expert: int

    @property
    def flags(self) -> list[str]:
        sizes = {
            "--tensor-model-parallel-size": self.tensor,
            "--pipeline-model-parallel-size": self.pipeline,
            "--context-parallel-size": self.context,
            "--expert-model-parallel-size": self.expert,
        }
        return [*(str(word) for size in sizes.items() for word in size), *COMMON.split()]

    def args(self, folder: Path) -> Args:
        """The flags of a colocated run with the model in `folder`."""
        words = ["--hf-checkpoint", str(folder), "--prompt-data", "x", "--custom-rm-path", "a.b", "--colocate"]
        words += ["--actor-num-gpus-per-node", str(self.gpus), "--use-kl-loss", "--ref-load", str(folder)]
        args = parse_args([*words, *self.flags])
        return check_model(args, read_hf_config(args))


LAYOUTS = (
    Layout("30B-A3B", 64, tensor=4, pipeline=1, context=1, expert=8),
    Layout("30B-A3B", 1024, tensor=4, pipeline=1, context=2, expert=8),
    Layout("235B-A22B", 64, tensor=4, pipeline=2, context=1, expert=16),
    Layout("235B-A22B", 1024, tensor=4, pipeline=2, context=2, expert=16),
)


def step_tokens(args: Args) -> float:
    """Tokens of a step for one data- and context-parallel rank."""
    return args.samples_per_step * MEAN_TOKENS / (args.data_parallel_size * args.context_parallel_size)


def traffic(args: Args, tokens: float) -> dict[str, float]:
    """Bytes that a GPU receives in a step of so many tokens for its rank (see the module)."""
    plan = memory_plan(args, gpu_bytes(GPU_GB), LONGEST)
    tensor, stages, context = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    hidden, layers = args.hidden_size or 0, (args.num_layers or 0) / stages
    again = args.recompute_granularity == "full"
    scored = bool(args.use_kl_loss or args.kl_coef)
    forward = 1 + again + scored
    states = BF16 * hidden * tokens
    keys = 2 * BF16 * max(1.0, (args.num_query_groups or 0) / tensor) * (args.kv_channels or 0) * tokens
    chosen, blocks = args.moe_router_topk or 0, 1 if args.num_experts else 2
    return {
        "gradients": args.optimizer_steps_per_step * _gradients(args, plan.gradients / FP32),
        "TP": layers * blocks * (2 * forward + 3) * states * _others(tensor),
        "CP": layers * (forward + 1) * keys * (context - 1),
        "PP": (forward - again + 1) * states / tensor if stages > 1 else 0.0,
        "EP": layers * (forward + 1) * 2 * chosen * states / tensor * _others(args.expert_model_parallel_size),
        "sync": BF16 * num_parameters(args) - plan.weights,
    }


def _gradients(args: Args, held: float) -> float:
    """Bytes that a GPU which holds so many parameters receives in an optimizer step."""
    stages, world = args.pipeline_model_parallel_size, args.actor_world_size
    split = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    experts = expert_parameters(args) / (split * stages)
    parts = ((held - experts, args.tensor_model_parallel_size), (experts, split))
    return sum((FP32 + BF16) * count * _others(world // (divided * stages)) for count, divided in parts)


def _others(size: int) -> float:
    """The share of a gathered tensor that comes from the other GPUs."""
    return (size - 1) / size


def figures(layout: Layout, folder: Path) -> dict[str, float]:
    """All figures of a layout, in bytes."""
    args = layout.args(folder)
    plan = memory_plan(args, gpu_bytes(GPU_GB), LONGEST)
    memory = {"trainer": plan.resident, "most": max(turns(args, plan).values())}
    return memory | traffic(args, step_tokens(args))


def write_model(model: str, parent: Path) -> Path:
    """A folder with the config.json of a model of `MODELS`."""
    folder = parent / model
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def print_layouts(console: Console) -> dict[str, Any]:
    """Print the table of all layouts; the result, whose ratio is the larger model's traffic on 1,024 GPUs over 64."""
    with tempfile.TemporaryDirectory() as name:
        rows = [(layout, figures(layout, write_model(layout.model, Path(name)))) for layout in LAYOUTS]
    console.print(table(rows))
    few, many = (sum(row[kind] for kind in KINDS) for _, row in rows[-2:])
    result = {"name": "scale", "ratio": many / few, "ours": many / GB, "reference": few / GB}
    return result | {"layouts": [asdict(layout) | row for layout, row in rows]}


def table(rows: Sequence[tuple[Layout, Mapping[str, float]]]) -> Table:
    title = f"GB on a GPU, and GB that it receives in a step of {SAMPLES:,} trajectories of {MEAN_TOKENS:,} tokens"
    made = Table(title=title, title_justify="left")
    made.add_column("model")
    for name in ("GPUs", "TP x PP x CP", "EP", "trainer", "most at once", *KINDS):
        made.add_column(name, justify="right")
    for layout, row in rows:
        sizes = f"{layout.tensor} x {layout.pipeline} x {layout.context}"
        shown = (f"{row[name] / GB:,.1f}" for name in ("trainer", "most", *KINDS))
        made.add_row(layout.model, f"{layout.gpus:,}", sizes, str(layout.expert), *shown)
    return made
