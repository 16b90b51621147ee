"""The project's trainer with random weights and made-up samples, where there is neither a model nor a flags' parser."""

from __future__ import annotations

import os
import random
import re
import shlex
import socket
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sleuth.algo.names import Estimator, KLKind
from sleuth.algo.optimizer_steps import OptimizerStepBatch
from sleuth.megatron import device
from sleuth.megatron.model import ModelShape
from sleuth.megatron.trainer import Trainer
from sleuth.megatron.weights import hf_names
from sleuth.sample import TrainSample

MODELS = Path(__file__).resolve().parents[2] / "scripts" / "models"
SMALL = ModelShape(
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=704,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=64,
    vocab_size=1024,
    norm_epsilon=1e-6,
    rotary_base=1e4,
    add_qkv_bias=True,
    qk_layernorm=False,
    untie_embeddings_and_output_weights=False,
    max_position_embeddings=4096,
)


@dataclass
class Settings:
    """The flags that trainer and plan read, as one process has them. `sleuth.arguments` would need more packages."""

    dtype: str = "bfloat16"
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    lr: float = 1e-3
    adam_eps: float = 1e-8
    seed: int = 1234
    cpu_threads_per_actor: int | None = 1
    attention_backend: str = "auto"
    async_save: bool = False

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    num_layers_per_virtual_pipeline_stage: int | None = None
    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    gradient_accumulation_fusion: bool = False
    moe_grouped_gemm: bool = False
    actor_world_size: int = 1
    rollout_num_gpus_per_engine: int = 1
    sglang_mem_fraction_static: float = 0.0

    min_lr: float = 0.0
    lr_warmup_steps: int = 0
    lr_decay_steps: int = 1000
    lr_decay_style: str = "constant"
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    clip_grad: float = 0.0

    loss_type: Literal["policy", "sft"] = "policy"
    rollout_temperature: float = 1.0
    log_probs_chunk_size: int = 1024
    label_smoothing: float = 0.0
    entropy_coef: float = 0.0
    advantage_estimator: Estimator = "grpo"
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    eps_clip_c: float | None = None
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: KLKind = "low_var_kl"
    kl_coef: float = 0.0
    kl_penalty_type: KLKind = "k1"
    disable_grpo_std_normalization: bool = False
    n_samples_per_prompt: int = 1
    use_tis: bool = False
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    custom_tis_function_path: str | None = None
    rejected_in_denominator: bool = False
    calculate_per_token_loss: bool = True
    score_old_log_probs: bool = False
    use_dynamic_batch_size: bool = True

    hf_checkpoint: str = ""
    ref_load: Path | None = None
    load: Path | None = None
    save: Path | None = None
    save_keep: int = 1
    finetune: bool = False
    verify: bool = True


class RandomTrainer(Trainer):
    """The trainer of a model of `shape` with random weights, which depend on the tensors' names alone.

    They are drawn on the CPU, the same on every machine, or with `fast` on the device.
    """

    def __init__(self, settings: Settings, shape: ModelShape, *, fast: bool = False) -> None:
        self._given_shape, self._fast = shape, fast
        if not torch.distributed.is_initialized():
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=_port())
        super().__init__(settings)

    def _model_shape(self) -> ModelShape:
        return self._given_shape

    def _load_initial_weights(self) -> None:
        shapes = dict(tensor_shapes(self._given_shape))
        where = device.local_device() if self._fast else torch.device("cpu")
        self.weights.load(lambda name: random_tensor(name, shapes[name], where))


def tensor_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, sizes) of every tensor of a dense model."""
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    queries, keys = (n * shape.kv_channels for n in (shape.num_attention_heads, shape.num_query_groups))
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
    rows |= {"gate_proj": ffn, "up_proj": ffn, "down_proj": hidden, "embed_tokens": shape.vocab_size}
    columns = {"o_proj": queries, "down_proj": ffn}
    for name in hf_names(shape):
        part, kind = name.split(".")[-2:]
        if name == "lm_head.weight":
            yield name, (shape.vocab_size, hidden)
        elif part in ("q_norm", "k_norm"):
            yield name, (shape.kv_channels,)
        elif "norm" in part:
            yield name, (hidden,)
        elif kind == "bias":
            yield name, (rows[part],)
        else:
            yield name, (rows[part], columns.get(part, hidden))


def random_tensor(name: str, sizes: tuple[int, ...], where: torch.device) -> Tensor:
    """float32; norms are about 1."""
    generator = torch.Generator(where).manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(sizes, generator=generator, device=where)
    if "norm" in name:
        return 1.0 + 0.1 * values
    return values * (0.1 if name.endswith("bias") else 0.05)


def make_samples(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> list[TrainSample]:
    """Trajectories of these lengths, all of whose tokens but the first are trained on."""
    rng = random.Random(seed)
    return [
        TrainSample(
            [rng.randrange(vocabulary) for _ in range(length)],
            1,
            [1.0] * (length - 1),
            [-rng.expovariate(0.2) for _ in range(length - 1)],
            [rng.gauss(0, 1)] * (length - 1),
        )
        for length in lengths
    ]


def one_step(rows: Sequence[list[TrainSample]]) -> OptimizerStepBatch:
    """One optimizer step on these rows, each a micro-batch."""
    samples = [sample for row in rows for sample in row]
    return OptimizerStepBatch(list(rows), len(samples), float(sum(sum(s.loss_mask) for s in samples)))


def read_shape(name: str) -> tuple[ModelShape, dict[str, Any]]:
    """The shape of scripts/models/<name>.sh, and the same as flags, as the memory plan reads them."""
    text = (MODELS / f"{name}.sh").read_text(encoding="utf-8")
    found = re.search(r"^MODEL_ARGS=\((.*?)^\)", text, re.DOTALL | re.MULTILINE)
    assert found, f"no MODEL_ARGS in {name}.sh"
    flags: dict[str, str | None] = {}
    for word in shlex.split(found[1], comments=True):
        if word.startswith("--"):
            latest = word.removeprefix("--").replace("-", "_")
            flags[latest] = None
        else:
            flags[latest] = word
    return shape_of(flags)


def shape_of(flags: dict[str, str | None]) -> tuple[ModelShape, dict[str, Any]]:
    """See `read_shape`; a flag without a value is None."""

    def number(name: str, otherwise: int) -> int:
        return int(flags.get(name) or otherwise)

    heads, hidden = number("num_attention_heads", 0), number("hidden_size", 0)
    shape = ModelShape(
        num_layers=number("num_layers", 0),
        hidden_size=hidden,
        ffn_hidden_size=number("ffn_hidden_size", 0),
        num_attention_heads=heads,
        num_query_groups=number("num_query_groups", heads),
        kv_channels=number("kv_channels", hidden // heads),
        vocab_size=number("vocab_size", 0),
        norm_epsilon=float(flags.get("norm_epsilon") or 1e-6),
        rotary_base=float(flags.get("rotary_base") or 1e4),
        add_qkv_bias="add_qkv_bias" in flags,
        qk_layernorm="qk_layernorm" in flags,
        untie_embeddings_and_output_weights="untie_embeddings_and_output_weights" in flags,
        max_position_embeddings=32768,
    )
    return shape, {name: getattr(shape, name) for name in ModelShape.__slots__ if hasattr(shape, name)}


def _port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
