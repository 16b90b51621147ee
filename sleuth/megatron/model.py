"""The policy as a megatron-core GPT model, built from a Hugging Face config.

One function, `layer_spec`, decides whether TransformerEngine's layers are used; where it is not installed the
local layers run with our normalisation and packed attention. The model ends in a head that gives
log-probabilities rather than logits (see `logprobs.py`).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor

from sleuth.dtypes import dtype_name
from sleuth.megatron import device
from sleuth.megatron.attention import PackedAttention, PackedRow, rotary_angles, rotary_frequencies
from sleuth.megatron.logprobs import HeadOptions, token_statistics
from sleuth.megatron.parallel import Layout

if TYPE_CHECKING:
    from sleuth.arguments.hf_config import Llama3Scaling

logger = logging.getLogger(__name__)

if not hasattr(moe_utils, "te_general_gemm"):
    # Megatron's router uses this name, which it imports only if TransformerEngine is installed.
    moe_utils.te_general_gemm = None


class ModelSettings(Layout, Protocol):
    """The arguments of training on which the model depends."""

    @property
    def dtype(self) -> str: ...
    @property
    def attention_backend(self) -> str: ...
    @property
    def recompute_granularity(self) -> str | None: ...
    @property
    def recompute_method(self) -> str | None: ...

    recompute_num_layers: int | None
    gradient_accumulation_fusion: bool
    moe_grouped_gemm: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """The architecture of a model; the fields have the names of megatron's flags."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    norm_epsilon: float
    rotary_base: float
    add_qkv_bias: bool
    qk_layernorm: bool
    untie_embeddings_and_output_weights: bool
    max_position_embeddings: int
    num_experts: int | None = None
    moe_router_topk: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_router_pre_softmax: bool | None = None
    rotary_scaling: Llama3Scaling | None = None

    @classmethod
    def from_hf(cls, folder: Path) -> ModelShape:
        """Read the config.json of a Hugging Face model; ValueError for models that the trainer cannot compute."""
        # Not above: what reads flags and configs needs packages that the trainer itself can do without.
        from sleuth.arguments import model_flags
        from sleuth.arguments.files_check import parse_config
        from sleuth.arguments.hf_config import complete_config, rotary_scaling

        config = complete_config(parse_config(folder))
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(
            **{name: value for name, value in model_flags(config).items() if name in names},
            max_position_embeddings=config["max_position_embeddings"],
            rotary_scaling=rotary_scaling(config),
        )

    def rotary_frequencies(self, where: torch.device | None = None) -> Tensor:
        """Radians per position [kv_channels / 2] of the rotary position embeddings."""
        return rotary_frequencies(self.kv_channels, self.rotary_base, self.rotary_scaling, where)


def transformer_engine_available() -> bool:
    """Whether TransformerEngine's layers are used."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def resolve_dtype(name: str) -> torch.dtype:
    """The dtype of the model's weights for a value of --dtype."""
    name = dtype_name(name, on_gpu=torch.cuda.is_available())
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype {name}: expected auto, float32 or bfloat16")
    return torch.float32 if name == "float32" else torch.bfloat16


def attention_backend(name: str) -> AttnBackend:
    """--attention-backend -> the kernels that TransformerEngine is to use; without it the choice means nothing.

    For `flash` megatron switches all others off, and the first forward pass fails where there is no flash-attn that
    TransformerEngine accepts. cuDNN's fused attention, the same algorithm, then takes its place.
    """
    if not transformer_engine_available():
        return AttnBackend.auto
    if name == "flash" and not _flash_attn_accepted():
        logger.warning(
            "--attention-backend flash: TransformerEngine accepts no flash-attn that is installed; taking fused (cuDNN)"
        )
        return AttnBackend.fused
    return AttnBackend[name]


def _flash_attn_accepted() -> bool:
    attention = "transformer_engine.pytorch.attention.dot_product_attention"
    importlib.import_module(f"{attention}.backends")  # it looks for flash-attn, and notes which it accepts
    found = importlib.import_module(f"{attention}.utils").FlashAttentionUtils
    return found.is_installed or found.v3_is_installed


def transformer_config(args: ModelSettings, shape: ModelShape) -> TransformerConfig:
    """Megatron's config for training a model of `shape` by `args`. Call it after `parallel.initialize`."""
    return plain_config(
        shape,
        resolve_dtype(args.dtype),
        attention_backend=attention_backend(args.attention_backend),
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        sequence_parallel=args.sequence_parallel and args.tensor_model_parallel_size > 1,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        gradient_accumulation_fusion=_with_engine("gradient_accumulation_fusion", args.gradient_accumulation_fusion),
        moe_grouped_gemm=_with_engine("moe_grouped_gemm", args.moe_grouped_gemm and bool(shape.num_experts)),
    )


def _with_engine(name: str, wanted: bool) -> bool:
    """Whether to do what only TransformerEngine's layers can; a warning says where they are missing."""
    if wanted and not transformer_engine_available():
        logger.warning("--%s is off: it needs TransformerEngine, which is not installed", name.replace("_", "-"))
    return wanted and transformer_engine_available()


def plain_config(shape: ModelShape, dtype: torch.dtype, **training: Any) -> TransformerConfig:
    """Megatron's config for a model of `shape` in one process; `training` overrides fields of it."""
    engine = transformer_engine_available()
    experts: dict[str, Any] = {}
    if shape.num_experts:
        experts = {
            "num_moe_experts": shape.num_experts,
            "moe_router_topk": shape.moe_router_topk,
            "moe_ffn_hidden_size": shape.moe_ffn_hidden_size,
            "moe_router_load_balancing_type": "none",
            "moe_router_pre_softmax": bool(shape.moe_router_pre_softmax),
        }
    defaults = {"gradient_accumulation_fusion": False, "moe_grouped_gemm": False}
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.add_qkv_bias,
        qk_layernorm=shape.qk_layernorm,
        hidden_dropout=0.0,  # with dropout, log-probabilities would be random
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The length of packed rows differs between micro-batches, so pipeline stages exchange it.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the one that allows such rows; megatron checks it for dense models too
        # The loss carries its own weights: no division by micro-batches or tokens (see forward.py).
        calculate_per_token_loss=True,
        # Weights are always loaded; see _mark_sharded.
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=engine,
        bias_dropout_fusion=engine,
        apply_rope_fusion=engine,
        **experts,
        **(defaults | training),
    )


class RMSNorm(torch.nn.Module):
    """Root-mean-square normalisation that also works under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        where = device.local_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=where))
        # Tells megatron to sum this gradient over the ranks that share the sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., H] over its last dimension."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def layer_spec(config: TransformerConfig, chunk: int | None = None) -> ModuleSpec | TransformerBlockSubmodules:
    """The layers: TransformerEngine's if it is installed, else megatron's local ones with our norm and attention.

    `chunk` is the number of this rank's chunk in an interleaved pipeline; None if the rank has only one.
    """
    if transformer_engine_available():
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer = spec.submodules
    if config.num_moe_experts:
        # TransformerEngine does not fuse this norm into the experts, so its checkpoints do not rename it.
        layer.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config, chunk), layer_norm=RMSNorm)


class PolicyModel(GPTModel):
    """A GPT model that returns token statistics (log-probability, entropy, mean) instead of logits."""

    shape: ModelShape

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        packed_seq_params: PackedRow,
        selected: Tensor,
        targets: Tensor,
        options: HeadOptions,
    ) -> Tensor:
        """Run this pipeline stage on this rank's share of a packed row.

        input_ids and position_ids are [1, t]. `selected` [n] holds the positions in [0, t) whose statistics are wanted,
        `targets` [n] the ids that they predict. Returns statistics [n, 3] on the last stage (see `token_statistics`),
        hidden states [t (/ tp), 1, H] on the others.
        """
        hidden = self._hidden(input_ids, position_ids, packed_seq_params)
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        group = parallel_state.get_tensor_model_parallel_group()
        return token_statistics(hidden.squeeze(1)[selected], self._head(), targets, options, group)

    def logits(self, ids: Tensor) -> Tensor:
        """The logits [T, V] of one sequence of ids [T], in a process that holds the whole model."""
        bounds = torch.tensor([0, len(ids)], dtype=torch.int32, device=ids.device)
        row = PackedRow.of([len(ids)], bounds, 1)
        hidden = self._hidden(ids[None], torch.arange(len(ids), device=ids.device)[None], row)
        return hidden.squeeze(1) @ self._head().T

    def _hidden(self, input_ids: Tensor, position_ids: Tensor, packed_seq_params: PackedRow) -> Tensor:
        if self.position_embedding_type == "none":
            frequencies = self.shape.rotary_frequencies(position_ids.device)
            angles = rotary_angles(position_ids[0], frequencies, self.config.params_dtype)
            packed_seq_params = dataclasses.replace(packed_seq_params, rotary=angles)
        hidden: Tensor = super().forward(input_ids, position_ids, None, packed_seq_params=packed_seq_params)
        return hidden

    def _head(self) -> Tensor:
        """This rank's part [V / tp, H] of the output layer, which is no longer on its way (--overlap-param-gather).

        The layer itself is not called, so its hooks, which wait for that, are.
        """
        for hook in self.output_layer._forward_pre_hooks.values():
            hook(self.output_layer, ())
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the hidden states: megatron's own method would compute all logits."""
        return hidden_states


def build_model(shape: ModelShape, config: TransformerConfig) -> list[PolicyModel]:
    """This rank's part of the model, with uninitialised weights, on this process's device.

    The list has one model or, in an interleaved pipeline, several chunks of layers that are not adjacent.
    """
    tp = config.tensor_model_parallel_size
    if shape.vocab_size % tp:
        raise ValueError(
            f"--tensor-model-parallel-size {tp} does not divide the vocabulary of {shape.vocab_size} words; "
            "expected a divisor"
        )
    if config.virtual_pipeline_model_parallel_size is None:
        return [_build_chunk(shape, config, None)]
    return [_build_chunk(shape, config, chunk) for chunk in range(config.virtual_pipeline_model_parallel_size)]


def _build_chunk(shape: ModelShape, config: TransformerConfig, chunk: int | None) -> PolicyModel:
    model = PolicyModel(
        config=config,
        transformer_layer_spec=layer_spec(config, chunk),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        vp_stage=chunk,
        parallel_output=True,
        share_embeddings_and_output_weights=not shape.untie_embeddings_and_output_weights,
        position_embedding_type="rope" if transformer_engine_available() else "none",  # ours is in its attention
        rotary_base=shape.rotary_base,
    )
    model.shape = shape
    if model.position_embedding_type == "rope":  # megatron knows one stretched variant, with fixed constants
        model.rotary_pos_emb.inv_freq = shape.rotary_frequencies(model.rotary_pos_emb.inv_freq.device)
    _mark_sharded(model)
    return model.to(device.local_device())


def _mark_sharded(model: PolicyModel) -> None:
    """Mark the sharded weights for megatron, which marks them only when it initialises them; we skip that.

    Without the mark, the norm of the gradient would count only the first rank's part.
    """
    for module in model.modules():
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            continue
        if module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            set_tensor_model_parallel_attributes(module.weight, True, dim, 1)
