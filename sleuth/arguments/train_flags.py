"""How the model is trained: batches, parallelism, loss, optimizer, numerics; and the model's own shape.

See `run_flags.py` for how these classes become flags.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from sleuth.arguments.run_flags import DType, Fraction, Group

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class LossArgs(Group):
    """Loss"""

    loss_type: Literal["policy", "sft"] = Field(
        "policy", description="policy: reinforcement learning from rollouts; sft: supervised training on --prompt-data."
    )
    advantage_estimator: Literal[
        "grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "importance_sampling"
    ] = Field(
        "grpo",
        description="How rewards become advantages, and advantages a loss. grpo: rewards normalised within their "
        "group, clipped ratio of each token; gspo: clipped ratio of the sequence; cispo: bounded ratio as a weight; "
        "reinforce_plus_plus: rewards normalised over the step; reinforce_plus_plus_baseline: the same after "
        "subtracting the group's mean; importance_sampling: unclipped ratio to the engine's probability.",
    )
    disable_grpo_std_normalization: bool = Field(
        False, description="Advantage = reward - group mean, not divided by the group's standard deviation."
    )
    eps_clip: Fraction = Field(0.2, description="Probability ratios below 1 - this are clipped.")
    eps_clip_high: NonNegativeFloat = Field(0.28, description="Probability ratios above 1 + this are clipped.")
    eps_clip_c: Annotated[float, Field(gt=1.0)] | None = Field(
        None, description="Dual clip: bound of ratio x |advantage| for negative advantages [off]."
    )
    use_kl_loss: bool = Field(False, description="Add the KL divergence from the reference (--ref-load) to the loss.")
    kl_loss_coef: NonNegativeFloat = Field(0.001, description="Coefficient of the KL loss.")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field(
        "low_var_kl", description="Estimator of the KL divergence; low_var_kl is k3, clamped."
    )
    kl_coef: NonNegativeFloat = Field(
        0.0,
        description="KL penalty in the reward: this times the sum over a sample's trained tokens of the KL estimate "
        "between the policy, as it was before the step, and the reference is subtracted before advantages.",
    )
    kl_penalty_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field(
        "k1", description="Estimator of the KL divergence in --kl-coef's penalty."
    )
    entropy_coef: NonNegativeFloat = Field(0.0, description="Coefficient of the entropy bonus.")
    overlong_buffer_len: PositiveInt | None = Field(
        None,
        description="Overlong shaping (DAPO): the reward falls linearly over the last so many tokens before "
        "--rollout-max-response-len, by the longest turn of a trajectory [off].",
    )
    overlong_penalty_factor: NonNegativeFloat = Field(
        1.0, description="What is subtracted from the reward of a trajectory with a turn of that full length."
    )
    score_old_log_probs: bool = Field(
        False,
        description="Compute the log-probabilities of the policy before the step in a pass of their own also where "
        "a step has one optimizer step, whose first forward pass gives the same ones.",
    )
    calculate_per_token_loss: bool = Field(
        False, description="Mean over the tokens of an optimizer step, not over samples of their token means."
    )
    use_tis: bool = Field(
        False, description="Weight tokens by trainer's over engine's probability (truncated importance sampling)."
    )
    tis_clip: PositiveFloat = Field(2.0, description="Upper bound of that weight.")
    tis_clip_low: NonNegativeFloat = Field(0.0, description="Lower bound of that weight.")
    rejected_in_denominator: bool = Field(
        False,
        description="Tokens that the TIS hook rejects still count where the loss is averaged; otherwise it is as if "
        "they had never been trainable.",
    )
    max_logprob_diff: PositiveFloat | None = Field(
        None,
        description="Stop when the probe's log-probabilities in engine and trainer differ by more, in nats [never].",
    )
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="Label smoothing in supervised training."
    )


class BatchArgs(Group):
    """Batches"""

    global_batch_size: PositiveInt = Field(
        default_factory=lambda data: samples_per_step(data),
        description="Samples of one optimizer step [all of a step: --rollout-batch-size x --n-samples-per-prompt].",
    )
    micro_batch_size: PositiveInt = Field(1, description="Samples of one forward pass, without dynamic batches.")
    use_dynamic_batch_size: bool = Field(
        False, description="Fill forward passes up to --max-tokens-per-gpu instead of counting samples."
    )
    max_tokens_per_gpu: PositiveInt = Field(
        9216, description="Tokens of one forward pass per GPU, with dynamic batches; a longer sample goes alone."
    )
    balance_data: bool = Field(False, description="Give data-parallel ranks about equally many tokens.")
    log_probs_chunk_size: PositiveInt = Field(
        1024, description="Tokens whose logits are held at once when log-probabilities are computed."
    )


def samples_per_step(data: dict[str, Any]) -> int:
    """Samples of a step, from the fields of `RolloutArgs`."""
    return data["rollout_batch_size"] * data["n_samples_per_prompt"]


class ParallelArgs(Group):
    """Parallelism of the trainer and recomputation"""

    tensor_model_parallel_size: PositiveInt = Field(1, description="GPUs that share each matrix.")
    sequence_parallel: bool = Field(False, description="Also split the norms' activations over those GPUs.")
    pipeline_model_parallel_size: PositiveInt = Field(1, description="Stages that share the layers.")
    num_layers_per_virtual_pipeline_stage: PositiveInt | None = Field(
        None,
        description="Interleaved pipeline: each stage holds several chunks of so many layers, in turn with the other "
        "stages, which leaves GPUs idle for less time; for 3 stages or more [one chunk].",
    )
    context_parallel_size: PositiveInt = Field(1, description="GPUs that share each sequence.")
    expert_model_parallel_size: PositiveInt = Field(
        1, description="GPUs that share the experts of a layer, each holding some (mixtures of experts only)."
    )
    expert_tensor_parallel_size: PositiveInt = Field(
        1, description="GPUs that share each matrix of an expert (mixtures of experts only)."
    )
    recompute_granularity: Literal["full", "selective"] | None = Field(
        None, description="Recompute activations in the backward pass: whole layers, or attention only [nothing]."
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        None, description="With full: every group of layers, or only the first layers of each stage."
    )
    recompute_num_layers: PositiveInt | None = Field(
        None, description="With full: layers of a group (uniform), or how many layers (block)."
    )
    use_distributed_optimizer: bool = Field(
        False, description="Split the optimizer's state over the data-parallel ranks."
    )


class OptimizerArgs(Group):
    """Optimizer"""

    optimizer: Literal["adam"] = Field("adam", description="Adam with decoupled weight decay; no other yet.")
    lr: PositiveFloat = Field(1e-6, description="Learning rate, after warm-up.")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field("constant", description="Its course.")
    lr_warmup_steps: NonNegativeInt = Field(0, description="Optimizer steps in which it rises from 0.")
    lr_decay_steps: PositiveInt = Field(
        default_factory=lambda data: data["num_rollout"] * max(1, samples_per_step(data) // data["global_batch_size"]),
        description="Optimizer steps until it reaches --min-lr [all of the run].",
    )
    min_lr: NonNegativeFloat = Field(0.0, description="Its lowest value when it decays.")
    weight_decay: NonNegativeFloat = Field(0.01, description="Weight decay; norms and biases have none.")
    adam_beta1: Beta = Field(0.9, description="Decay of the gradient's mean.")
    adam_beta2: Beta = Field(0.98, description="Decay of the gradient's square.")
    adam_eps: PositiveFloat = Field(1e-8, description="Adam's epsilon.")
    clip_grad: NonNegativeFloat = Field(1.0, description="Largest norm of the gradient; 0 does not clip.")


class NumericsArgs(Group):
    """Numerics and randomness"""

    seed: NonNegativeInt = Field(1234, description="Seed of data order, sampling and initial weights.")
    dtype: DType = Field("auto", description="Precision of the trainer: auto is bfloat16 on GPUs, float32 on CPUs.")
    attention_dropout: float = Field(0.0, description="Only 0: with dropout, log-probabilities would be random.")
    hidden_dropout: float = Field(0.0, description="Only 0: with dropout, log-probabilities would be random.")
    accumulate_allreduce_grads_in_fp32: bool = Field(
        True, description="Always so here; accepted for compatibility with Megatron's scripts."
    )
    attention_softmax_in_fp32: bool = Field(
        True, description="Always so here; accepted for compatibility with Megatron's scripts."
    )
    attention_backend: Literal["auto", "flash", "fused", "unfused"] = Field(
        "auto",
        description="Attention kernels where TransformerEngine is installed: auto takes the fastest there is; flash is "
        "flash-attn, and cuDNN's where none is installed that it accepts; fused is cuDNN's. Without TransformerEngine "
        "there is one, torch's own.",
    )


class ModelArgs(Group):
    """Model (scripts/models/*.sh): what is left out comes from the checkpoint's config; a contradiction is an error"""

    swiglu: bool | None = Field(None, description="Gated SiLU in the feed-forward layers.")
    num_layers: PositiveInt | None = Field(None, description="Layers.")
    hidden_size: PositiveInt | None = Field(None, description="Width of the residual stream.")
    ffn_hidden_size: PositiveInt | None = Field(None, description="Width of the feed-forward layers.")
    num_attention_heads: PositiveInt | None = Field(None, description="Attention heads.")
    group_query_attention: bool | None = Field(None, description="Heads share keys and values in groups.")
    num_query_groups: PositiveInt | None = Field(None, description="Those groups: heads of keys and values.")
    kv_channels: PositiveInt | None = Field(None, description="Width of one head.")
    qk_layernorm: bool | None = Field(None, description="Normalise queries and keys (Qwen3).")
    add_qkv_bias: bool | None = Field(None, description="Biases of queries, keys and values (Qwen2).")
    disable_bias_linear: bool | None = Field(None, description="No biases elsewhere.")
    normalization: Literal["RMSNorm"] | None = Field(None, description="Kind of norm.")
    norm_epsilon: PositiveFloat | None = Field(None, description="Epsilon of the norms.")
    use_rotary_position_embeddings: bool | None = Field(None, description="Rotary position embeddings.")
    rotary_base: PositiveFloat | None = Field(None, description="Their base (theta).")
    vocab_size: PositiveInt | None = Field(None, description="Rows of the embedding, before padding.")
    untie_embeddings_and_output_weights: bool | None = Field(None, description="The output layer has its own matrix.")
    num_experts: PositiveInt | None = Field(None, description="Experts of each layer (Qwen3-MoE).")
    moe_router_topk: PositiveInt | None = Field(None, description="Experts that see a token.")
    moe_ffn_hidden_size: PositiveInt | None = Field(None, description="Width of one expert.")
    moe_router_pre_softmax: bool | None = Field(
        None, description="Weights of a token's experts need not sum to 1: the softmax is over all experts."
    )
