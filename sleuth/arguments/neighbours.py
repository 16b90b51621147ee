"""Flags of related systems, for error messages: those with another name here, and those that do not exist here."""

from __future__ import annotations

UNSUPPORTED = {
    "partial_rollout": "partial rollouts are not supported yet; every trajectory is finished in its own step",
    "over_sampling_batch_size": "over-sampling is not supported yet; use --dynamic-sampling-filter-path alone",
    "async_rollout": "asynchronous rollouts are not supported yet; each step's rollout precedes its training",
    "max_policy_lag": "asynchronous rollouts are not supported yet; see --update-weights-interval",
    "lora_rank": "LoRA is not supported yet; all parameters are trained",
    "lora_alpha": "LoRA is not supported yet; all parameters are trained",
    "use_critic": "critics (PPO) are not supported; --advantage-estimator grpo needs none",
    "wandb_key": (
        "a key on a command line is readable by everyone on the machine; set WANDB_API_KEY or WANDB_KEY in the "
        "environment"
    ),
    "optimizer_cpu_offload": "offloading the optimizer to the CPU is not supported yet",
    "fp8_format": "fp8 training is not supported yet; use --dtype bfloat16",
    "bf16": "there is one flag for the precision: --dtype bfloat16",
    "fp16": "fp16 training is not supported; use --dtype bfloat16",
    "num_epoch": "the length of a run is given in steps: --num-rollout",
    "rollout_function_path": "the rollout itself cannot be replaced; name a hook with --custom-generate-function-path",
    "group_rm": "rewards are given sample by sample, by --custom-rm-path",
    "save_retain_interval": "the latest checkpoints are kept: --save-keep",
    "rm_type": "there are no built-in rewards; name a hook with --custom-rm-path module.function",
    "use_rollout_logprobs": "not supported; to correct for the engine's log-probabilities use --use-tis",
    "prefill_num_servers": "prefill/decode disaggregation is not supported",
    "rollout_seed": "there is one seed: --seed",
    "eval_config": "evaluation sets are given by --eval-prompt-data NAME PATH",
    "loss_mask_type": "the loss mask is exactly what the model generated; there is no other",
    "multi_latent_attention": "multi-latent attention is not supported",
    "position_embedding_type": "only rotary position embeddings are supported: --use-rotary-position-embeddings",
    "moe_layer_freq": "every layer of a mixture of experts has experts; leave it out",
    "moe_router_load_balancing_type": "the router is trained by the loss alone, as if this were none; leave it out",
    "moe_aux_loss_coeff": "the router is trained by the loss alone, as if this were 0; leave it out",
    "moe_token_dispatcher_type": "it is always alltoall; leave it out",
    "moe_router_score_function": "it is always softmax; leave it out",
    "num_virtual_stages_per_pipeline_rank": "interleaved pipelines: use --num-layers-per-virtual-pipeline-stage",
    "virtual_pipeline_model_parallel_size": "interleaved pipelines: use --num-layers-per-virtual-pipeline-stage",
}
"""Flags of related systems that a user may bring along, and what to do instead."""

_OTHER_NAMES = {
    "lr": "learning_rate actor_lr actor_learning_rate",
    "num_rollout": (
        "max_steps num_steps total_training_steps train_iters training_steps num_train_steps total_steps n_steps"
    ),
    "rollout_batch_size": (
        "questions_per_batch train_batch_size prompts_per_step num_prompts_per_step groups_per_batch "
        "num_groups_per_rollout_batch batch_size"
    ),
    "n_samples_per_prompt": (
        "group_size num_generations n_resp_per_prompt rollout_n samples_per_prompt num_samples_per_prompt n_samples"
    ),
    "save_interval": "save_every save_freq save_steps checkpoint_interval ckpt_interval save_frequency",
    "save_keep": "keep_latest_k save_total_limit max_ckpt_to_keep max_actor_ckpt_to_keep keep_last_k max_checkpoints",
    "hf_checkpoint": (
        "base_model model model_name model_path model_name_or_path pretrained tokenizer_path tokenizer_model"
    ),
    "lr_warmup_steps": "lr_warmup_iters warmup_steps num_warmup_steps",
    "lr_decay_steps": "lr_decay_iters",
    "load": "resume resume_from_checkpoint resume_from checkpoint_path load_checkpoint",
    "ref_load": "ref_model reference_model ref_path",
    "prompt_data": "train_data train_file train_files data_path dataset train_dataset",
    "eval_prompt_data": "eval_data val_files test_file eval_dataset validation_data",
    "eval_interval": "eval_every eval_freq test_freq eval_steps validation_interval",
    "run_dir": "output_dir log_dir log_path logdir tensorboard_dir default_local_dir",
    "rollout_temperature": "temperature",
    "rollout_top_p": "top_p",
    "rollout_top_k": "top_k",
    "rollout_max_response_len": "max_response_length max_new_tokens max_tokens response_length max_completion_length",
    "rollout_max_context_len": (
        "max_model_len max_seq_len seq_length max_length max_position_embeddings context_length max_trajectory_tokens"
    ),
    "tensor_model_parallel_size": "tp tp_size tensor_parallel_size",
    "pipeline_model_parallel_size": "pp pp_size pipeline_parallel_size",
    "context_parallel_size": "cp cp_size ulysses_sequence_parallel_size",
    "expert_model_parallel_size": "ep ep_size expert_parallel_size",
    "rollout_num_gpus_per_engine": "rollout_tp_size sglang_tp_size gen_tp",
    "sglang_mem_fraction_static": "gpu_memory_utilization mem_fraction_static",
    "actor_num_gpus_per_node": "n_gpus_per_node gpus_per_node num_gpus",
    "actor_num_nodes": "nnodes num_nodes",
    "micro_batch_size": "micro_train_batch_size per_device_train_batch_size ppo_micro_batch_size",
    "global_batch_size": "ppo_mini_batch_size mini_batch_size",
    "max_tokens_per_gpu": "ppo_max_token_len_per_gpu",
    "advantage_estimator": "adv_estimator algorithm",
    "eps_clip": "clip_ratio clip_ratio_low epsilon clip_eps",
    "eps_clip_high": "clip_ratio_high epsilon_high",
    "eps_clip_c": "clip_ratio_c",
    "kl_loss_coef": "kl_coefficient beta init_kl_coef",
    "entropy_coef": "entropy_coeff entropy_bonus",
    "clip_grad": "grad_clip max_grad_norm gradient_clip_val",
    "disable_grpo_std_normalization": "no_std_normalization",
    "use_wandb": "wandb",
    "wandb_project": "project_name",
    "wandb_group": "experiment_name",
    "seed": "data_seed random_seed",
    "custom_rm_path": "reward_function reward_fn reward_model_path custom_reward_function",
    "search_backend": "retriever backend",
    "search_url": "retriever_url retrieval_url",
    "recompute_granularity": "recompute_activations gradient_checkpointing enable_gradient_checkpointing",
    "use_dynamic_batch_size": "use_dynamic_bsz",
    "dtype": "precision torch_dtype",
    "sglang_dtype": "rollout_dtype",
    "rollout_max_concurrency": "concurrency max_concurrency sglang_server_concurrency",
}

SAME_AS = {other: name for name, others in _OTHER_NAMES.items() for other in others.split()}
"""Names that related systems give to a setting -> its name here."""
