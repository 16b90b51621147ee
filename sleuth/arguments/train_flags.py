"""Flags that say how the model is trained (batches, parallelism, loss, optimizer, numerics), and its shape.

`run_flags.py` explains how these classes become flags.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from sleuth.algo.names import Estimator, KLKind
from sleuth.arguments.run_flags import DType, Fraction, Group

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class LossArgs(Group):
    """Loss"""

    loss_type: Literal["policy", "sft"] = Field(
        "policy", description="policy: reinforcement learning from rollouts; sft: supervised training on --prompt-data."
    )
    advantage_estimator: Estimator = Field(
        "grpo",
        description="How rewards become advantages, and advantages a loss. grpo: rewards normalised within their "
        "group, clipped ratio of each token; gspo: clipped ratio of the sequence; cispo: bounded ratio as a weight; "
        "reinforce_plus_plus: rewards normalised over the step; reinforce_plus_plus_baseline: the same after "
        "subtracting the group's mean; importance_sampling: unclipped ratio to the engine's probability.",
    )
    disable_grpo_std_normalization: bool = Field(
        False, description="Advantage = reward - mean of its group, without dividing by the group's standard deviation."
    )
    eps_clip: Fraction = Field(
        0.2, description="Clip probability ratios (new policy over old) that are below 1 - this value."
    )
    eps_clip_high: NonNegativeFloat = Field(
        0.28, description="Clip probability ratios (new policy over old) that are above 1 + this value."
    )
    eps_clip_c: Annotated[float, Field(gt=1.0)] | None = Field(
        None,
        description="Dual clip: where the advantage is negative, a probability ratio counts as this value at most "
        "[off].",
    )
    use_kl_loss: bool = Field(False, description="Add the KL divergence from the reference (--ref-load) to the loss.")
    kl_loss_coef: NonNegativeFloat = Field(0.001, description="Coefficient of the KL loss (--use-kl-loss).")
    kl_loss_type: KLKind = Field(
        "low_var_kl",
        description="Estimator of the KL divergence in the KL loss (--use-kl-loss); low_var_kl is k3, clamped.",
    )
    kl_coef: NonNegativeFloat = Field(
        0.0,
        description="Coefficient of a KL penalty in the reward. Before advantages are computed, a sample's reward "
        "is reduced by this value times the KL estimate between the policy before the step and the "
        "reference, summed over the sample's trained tokens.",
    )
    kl_penalty_type: KLKind = Field(
        "k1",
        description="Estimator of the KL divergence in the reward's KL penalty (--kl-coef); low_var_kl is k3, clamped.",
    )
    entropy_coef: NonNegativeFloat = Field(
        0.0, description="Coefficient of the entropy bonus in the loss; 0 adds none."
    )
    overlong_buffer_len: PositiveInt | None = Field(
        None,
        description="Overlong shaping (DAPO): over this many tokens before --rollout-max-response-len the reward "
        "falls linearly, by --overlong-penalty-factor at the end. The longest turn of a trajectory "
        "counts [off].",
    )
    overlong_penalty_factor: NonNegativeFloat = Field(
        1.0,
        description="Overlong shaping (--overlong-buffer-len): what a turn of --rollout-max-response-len tokens "
        "costs in reward.",
    )
    score_old_log_probs: bool = Field(
        False,
        description="Score the policy before the step in a forward pass of its own even where a step is a single "
        "optimizer step, whose own forward pass gives the same log-probabilities.",
    )
    calculate_per_token_loss: bool = Field(
        False,
        description="Average the loss over all trained tokens of an optimizer step, not first over each sample's "
        "tokens and then over samples.",
    )
    use_tis: bool = Field(
        False,
        description="Truncated importance sampling: weight each token by its probability in the trainer over that "
        "in the engine.",
    )
    tis_clip: PositiveFloat = Field(
        2.0, description="Upper bound of the importance weights of the built-in truncation (--use-tis)."
    )
    tis_clip_low: NonNegativeFloat = Field(
        0.0, description="Lower bound of the importance weights of the built-in truncation (--use-tis)."
    )
    rejected_in_denominator: bool = Field(
        False,
        description="Count tokens that the TIS hook rejects in the denominators of the loss's averages; otherwise "
        "they count nowhere, as if they had never been trainable.",
    )
    max_logprob_diff: PositiveFloat | None = Field(
        None,
        description="Stop when engine and trainer, right after a weight update, give the tokens of a fixed probe "
        "log-probabilities that differ by more than this, in nats [never].",
    )
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="Label smoothing in supervised training (--loss-type sft); 0 is none."
    )


class BatchArgs(Group):
    """Batches"""

    global_batch_size: PositiveInt = Field(
        default_factory=lambda data: samples_per_step(data),
        description="Samples of one optimizer step [all of a step: --rollout-batch-size x --n-samples-per-prompt].",
    )
    micro_batch_size: PositiveInt = Field(
        1, description="Samples of one forward pass, without --use-dynamic-batch-size."
    )
    use_dynamic_batch_size: bool = Field(
        False,
        description="Fill each forward pass up to --max-tokens-per-gpu tokens instead of taking --micro-batch-size "
        "samples.",
    )
    max_tokens_per_gpu: PositiveInt = Field(
        9216,
        description="Most tokens of one forward pass per GPU, with --use-dynamic-batch-size; a longer sample gets a "
        "pass alone.",
    )
    balance_data: bool = Field(
        False, description="Distribute samples so that data-parallel ranks get about equally many tokens."
    )
    log_probs_chunk_size: PositiveInt = Field(
        1024, description="Tokens whose logits are held at once when log-probabilities are computed."
    )


def samples_per_step(data: dict[str, Any]) -> int:
    """The number of samples in a step, computed from the fields of `RolloutArgs`."""
    return data["rollout_batch_size"] * data["n_samples_per_prompt"]


class ParallelArgs(Group):
    """Parallelism of the trainer and recomputation"""

    tensor_model_parallel_size: PositiveInt = Field(
        1, description="Tensor parallelism: GPUs that share each weight matrix."
    )
    sequence_parallel: bool = Field(
        False,
        description="Sequence parallelism: the GPUs of --tensor-model-parallel-size also share the norms' activations.",
    )
    pipeline_model_parallel_size: PositiveInt = Field(
        1, description="Pipeline parallelism: stages that share the layers."
    )
    num_layers_per_virtual_pipeline_stage: PositiveInt | None = Field(
        None,
        description="Interleaved pipeline: layers of one chunk. A stage holds several chunks and works on them in "
        "turn, so that GPUs idle less. Needs --pipeline-model-parallel-size of 3 or more [one chunk a "
        "stage].",
    )
    context_parallel_size: PositiveInt = Field(1, description="Context parallelism: GPUs that share each sequence.")
    expert_model_parallel_size: PositiveInt = Field(
        1,
        description="Expert parallelism: GPUs that share a layer's experts, each holding some (mixtures of experts "
        "only).",
    )
    expert_tensor_parallel_size: PositiveInt = Field(
        1,
        description="Tensor parallelism of experts: GPUs that share each matrix of an expert (mixtures of experts "
        "only).",
    )
    recompute_granularity: Literal["full", "selective"] | None = Field(
        None,
        description="What the backward pass computes again instead of keeping its activations. full: whole layers; "
        "selective: attention only [nothing].",
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        None,
        description="With --recompute-granularity full. uniform: recompute all layers, in groups of "
        "--recompute-num-layers; block: only the first --recompute-num-layers of each stage.",
    )
    recompute_num_layers: PositiveInt | None = Field(
        None,
        description="With --recompute-granularity full: layers of one group (uniform), or how many layers to "
        "recompute (block).",
    )
    use_distributed_optimizer: bool = Field(
        False, description="Split the optimizer's state over the data-parallel ranks."
    )
    overlap_grad_reduce: bool = Field(
        False,
        description="Add up gradients over data-parallel ranks in buckets, each as soon as the last micro-batch's "
        "backward pass has filled it; otherwise all at its end.",
    )
    overlap_param_gather: bool = Field(
        False,
        description="With several optimizer steps a rollout, collect the updated weights of a layer while the next "
        "forward pass works on those before it. Needs --use-distributed-optimizer and --overlap-grad-reduce.",
    )
    gradient_accumulation_fusion: bool = Field(
        False,
        description="Add a linear layer's gradient to the sum of all micro-batches in the matrix product itself. Only "
        "TransformerEngine's layers do; without them it is off.",
    )
    moe_grouped_gemm: bool = Field(
        False,
        description="Multiply the tokens of all of a GPU's experts in one call (mixtures of experts only). Only "
        "TransformerEngine's layers do; without them it is off.",
    )


class OptimizerArgs(Group):
    """Optimizer"""

    optimizer: Literal["adam"] = Field("adam", description="Adam with decoupled weight decay; no other yet.")
    lr: PositiveFloat = Field(1e-6, description="Learning rate, after warm-up.")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="Course of the learning rate after warm-up: constant, or falling to --min-lr by a straight line "
        "(linear) or half a cosine (cosine).",
    )
    lr_warmup_steps: NonNegativeInt = Field(
        0, description="Optimizer steps in which the learning rate rises from 0 to --lr."
    )
    lr_decay_steps: PositiveInt = Field(
        default_factory=lambda data: data["num_rollout"] * max(1, samples_per_step(data) // data["global_batch_size"]),
        description="Optimizer steps after which a falling learning rate has reached --min-lr [all of the run].",
    )
    min_lr: NonNegativeFloat = Field(0.0, description="Lowest learning rate, where --lr-decay-style lets it fall.")
    weight_decay: NonNegativeFloat = Field(0.01, description="Weight decay of Adam; norms and biases have none.")
    adam_beta1: Beta = Field(0.9, description="Adam's beta1: decay of the running mean of the gradient.")
    adam_beta2: Beta = Field(0.98, description="Adam's beta2: decay of the running mean of the squared gradient.")
    adam_eps: PositiveFloat = Field(1e-8, description="Adam's epsilon, added to its denominator.")
    clip_grad: NonNegativeFloat = Field(
        1.0, description="Scale gradients down to this norm where theirs is larger; 0 does not clip."
    )


class NumericsArgs(Group):
    """Numerics and randomness"""

    seed: NonNegativeInt = Field(1234, description="Seed of data order, sampling and initial weights.")
    dtype: DType = Field("auto", description="Precision of the trainer: auto is bfloat16 on GPUs, float32 on CPUs.")
    attention_dropout: float = Field(
        0.0, description="Dropout in attention. Only 0 is accepted: dropout would make log-probabilities random."
    )
    hidden_dropout: float = Field(
        0.0, description="Dropout of hidden states. Only 0 is accepted: dropout would make log-probabilities random."
    )
    accumulate_allreduce_grads_in_fp32: bool = Field(
        True,
        description="Add up gradients in float32. Always so; the flag is accepted for compatibility with Megatron's "
        "scripts.",
    )
    attention_softmax_in_fp32: bool = Field(
        True,
        description="Compute attention's softmax in float32. Always so; the flag is accepted for Megatron's scripts.",
    )
    attention_backend: Literal["auto", "flash", "fused", "unfused"] = Field(
        "auto",
        description="Attention kernels where TransformerEngine is installed: auto takes the fastest there is; flash is "
        "flash-attn, and cuDNN's where none is installed that it accepts; fused is cuDNN's. Without TransformerEngine "
        "there is one, torch's own.",
    )


class ModelArgs(Group):
    """Model (scripts/models/*.sh): what is left out comes from the checkpoint's config; a contradiction is an error"""

    swiglu: bool | None = Field(None, description="Feed-forward layers are gated by a SiLU (SwiGLU).")
    num_layers: PositiveInt | None = Field(None, description="Transformer layers of the model.")
    hidden_size: PositiveInt | None = Field(None, description="Width of the residual stream.")
    ffn_hidden_size: PositiveInt | None = Field(None, description="Width of the feed-forward layers.")
    num_attention_heads: PositiveInt | None = Field(None, description="Attention heads (of queries) in a layer.")
    group_query_attention: bool | None = Field(
        None, description="Grouped-query attention: several heads of queries share one head of keys and values."
    )
    num_query_groups: PositiveInt | None = Field(
        None, description="Heads of keys and values in grouped-query attention (--group-query-attention)."
    )
    kv_channels: PositiveInt | None = Field(None, description="Width of one attention head.")
    qk_layernorm: bool | None = Field(None, description="Normalise queries and keys, as Qwen3 does.")
    add_qkv_bias: bool | None = Field(None, description="Queries, keys and values have biases, as in Qwen2.")
    disable_bias_linear: bool | None = Field(
        None, description="Linear layers have no biases, apart from those of --add-qkv-bias."
    )
    normalization: Literal["RMSNorm"] | None = Field(None, description="Kind of the model's norms.")
    norm_epsilon: PositiveFloat | None = Field(None, description="Epsilon of the model's norms.")
    use_rotary_position_embeddings: bool | None = Field(None, description="Encode positions by rotary embeddings.")
    rotary_base: PositiveFloat | None = Field(None, description="Base (theta) of the rotary position embeddings.")
    vocab_size: PositiveInt | None = Field(None, description="Rows of the model's embedding, before padding.")
    untie_embeddings_and_output_weights: bool | None = Field(
        None, description="The output layer has a matrix of its own instead of the embedding's."
    )
    num_experts: PositiveInt | None = Field(
        None, description="Experts of each layer, in a mixture of experts (Qwen3-MoE)."
    )
    moe_router_topk: PositiveInt | None = Field(
        None, description="Experts that process each token, in a mixture of experts."
    )
    moe_ffn_hidden_size: PositiveInt | None = Field(
        None, description="Width of one expert's feed-forward layer, in a mixture of experts."
    )
    moe_router_pre_softmax: bool | None = Field(
        None,
        description="In a mixture of experts, take the router's softmax over all experts: the weights of a token's "
        "experts then need not sum to 1.",
    )
