"""Flags that say what is run: devices, checkpoints, data, rollouts, evaluation, engines, hooks and logs.

Each class is one group of flags. Its docstring heads the group in `--help`; the description of a field is
the help of its flag, and the field `hf_checkpoint` is the flag `--hf-checkpoint`. The flags of training are in
`train_flags.py`; what must hold between flags is in `checks.py`.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0)]
DType = Literal["auto", "float32", "bfloat16"]


class Group(BaseModel):
    """Base class of the groups of flags: frozen, and an unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False, allow_inf_nan=False)


def _from_json(value: Any) -> Any:
    """Parse `value` if it is text (JSON from the command line); return anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a JSON object such as '{{\"enable_thinking\": false}}' ({error})") from None


JsonObject = Annotated[dict[str, Any], BeforeValidator(_from_json)]


def _nonzero(value: int) -> int:
    if value == 0:
        raise ValueError("expected -1 or at least 1")
    return value


TopK = Annotated[int, Field(ge=-1), AfterValidator(_nonzero)]


def _start_time_folder() -> Path:
    return Path("runs") / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")


class CheckpointArgs(Group):
    """Checkpoints and where results go"""

    hf_checkpoint: str = Field(
        description="Folder of the Hugging Face model: its config, its tokenizer and the engines' first weights."
    )
    ref_load: Path | None = Field(
        None,
        description="Weights that training starts from, unless --load holds a checkpoint, and the frozen reference "
        "of the KL terms: a torch_dist checkpoint, or a Hugging Face folder of the same shape [start "
        "from --hf-checkpoint, without a reference].",
    )
    load: Path | None = Field(
        None,
        description="Folder of torch_dist checkpoints to resume from; it may be the folder of --save, still empty.",
    )
    finetune: bool = Field(
        False,
        description="Take only the weights of --load: a new run, from step 1 and the data's first row, with a new "
        "optimizer.",
    )
    verify: bool = Field(
        True,
        description="Before a checkpoint (--load, --ref-load) is loaded, compare its files with the checksums that "
        "were saved with it.",
    )
    save: Path | None = Field(None, description="Folder for checkpoints; without it nothing is saved.")
    save_interval: PositiveInt = Field(
        20, description="Steps between checkpoints in --save; the last step is always saved."
    )
    save_keep: NonNegativeInt = Field(
        3,
        description="How many of the latest checkpoints to keep in --save, besides the newest that training is known "
        "to have gone on from; 0 keeps all, and all of the journal.",
    )
    async_save: bool = Field(
        True,
        description="Write a checkpoint in the background, while the run goes on; training waits only until weights "
        "and optimizer are copied to host memory. It takes its place in --save when it is whole.",
    )
    save_on_exit: bool = Field(
        True,
        description="With --save: on ctrl-C or SIGTERM save the last whole step first, within 60 s.",
    )
    rollout_journal: bool = Field(
        True,
        description="With --save: write each finished sample to the folder journal in it, so that a run that goes on "
        "from a checkpoint (--load) takes the samples of an interrupted run instead of generating new ones.",
    )
    run_dir: Path = Field(
        default_factory=_start_time_folder,
        description="Folder for logs, metrics and trajectories of this run [runs/<UTC start time>].",
    )


class ClusterArgs(Group):
    """Devices (on a machine without GPUs, read "process" for "GPU")"""

    actor_num_nodes: PositiveInt = Field(
        1, description="Nodes (machines) on which the trainer runs; where the cluster has fewer, they take more ranks."
    )
    actor_num_gpus_per_node: PositiveInt = Field(
        1, description="GPUs that the trainer uses on each of its nodes (--actor-num-nodes)."
    )
    colocate: bool = Field(
        False,
        description="Engines and trainer share their GPUs; the engines release their memory while the trainer "
        "works. The run takes max(training, rollout) GPUs instead of their sum.",
    )
    rollout_num_gpus: PositiveInt | None = Field(
        default_factory=lambda data: _colocated_gpus(data),
        description="GPUs of all engines together [with --colocate: as many as the trainer uses].",
    )
    rollout_num_gpus_per_engine: PositiveInt = Field(
        1, description="GPUs over which one engine splits its model (tensor parallelism of the engine)."
    )
    allow_tensor_parallel_across_nodes: bool = Field(
        False,
        description="Allow that tensor-parallel ranks of the trainer, or the GPUs of an engine, lie on different "
        "nodes, which is slow: they wait for each other several times in each layer.",
    )
    ray_address: str | None = Field(
        None,
        description="Address of the Ray cluster to join, or auto [RAY_ADDRESS if set, else with several "
        "--actor-num-nodes the Ray at MASTER_ADDR:6379 if that is set, else a local cluster is started].",
    )
    cpu_threads_per_actor: PositiveInt | None = Field(
        None, description="CPU threads of each trainer process on a machine without GPUs [cores / trainer processes]."
    )
    cpu_threads_per_engine: PositiveInt = Field(
        1,
        description="CPU threads of each engine on a machine without GPUs; more than one help models of about 100 "
        "million parameters and more, and make tiny ones many times slower.",
    )


def _colocated_gpus(data: dict[str, Any]) -> int | None:
    return data["actor_num_nodes"] * data["actor_num_gpus_per_node"] if data["colocate"] else None


class DataArgs(Group):
    """Prompt data"""

    prompt_data: str = Field(
        description="Parquet or JSONL file of the training prompts; path@[a:b] takes rows a to b. "
        "owner/set[@revision][/file], where there is no such file here, is a data set of the Hugging Face hub "
        "[its train.parquet]."
    )
    input_key: str = Field(
        "prompt", description="Column of --prompt-data that holds the prompt: a string or a list of messages."
    )
    label_key: str = Field(
        "reward_model", description="Column of --prompt-data that holds the label, handed to the reward hook as it is."
    )
    metadata_key: str = Field(
        "metadata",
        description="Column of the prompt data that holds a dictionary for the hooks (sample.metadata); it may be "
        "absent.",
    )
    tool_key: str | None = Field(
        None, description="Column of the prompt data that holds the tools offered to the chat template."
    )
    prompt_template: str | None = Field(
        None,
        description="Instruction for rows that hold a bare question, in training and evaluation: tags (the protocol of "
        "generate_with_search.py), tools (that of generate_with_tools.py), or a text file with {question} in it; in a "
        ".json file, a list of messages [prompts as they are].",
    )
    apply_chat_template: bool = Field(False, description="Render prompts with the tokenizer's chat template.")
    apply_chat_template_kwargs: JsonObject = Field(
        default_factory=dict, description="JSON object of further arguments of the tokenizer's chat template."
    )
    data_source_filter: list[str] | None = Field(
        None, description="Train only on rows of --prompt-data whose data_source column is one of these [all rows]."
    )
    rollout_shuffle: bool = Field(
        False, description="Shuffle the training prompts anew in every epoch, in an order that --seed decides."
    )


class RolloutArgs(Group):
    """Rollout: how trajectories are sampled"""

    num_rollout: PositiveInt = Field(3000, description="Steps of the run: each is one rollout and the training on it.")
    rollout_batch_size: PositiveInt = Field(32, description="Prompts of one step (in supervised training: samples).")
    n_samples_per_prompt: PositiveInt = Field(
        default_factory=lambda data: 1 if data.get("loss_type") == "sft" else 8,
        description="Trajectories sampled for each training prompt, its group [8; 1 in supervised training].",
    )
    rollout_max_response_len: PositiveInt = Field(512, description="Most new tokens of one turn (one generation).")
    rollout_max_context_len: PositiveInt | None = Field(
        None, description="Most tokens of a whole trajectory, prompt included [the model's own limit]."
    )
    rollout_temperature: Annotated[float, Field(gt=0.0)] = Field(
        1.0, description="Sampling temperature of rollouts; the trainer scores at the same one."
    )
    rollout_top_p: PositiveFraction = Field(
        1.0,
        description="Nucleus sampling in rollouts: sample from the likeliest tokens that together have this "
        "probability.",
    )
    rollout_top_k: TopK = Field(
        -1,
        description="Sample from this many of the likeliest tokens, in rollouts and in evaluation; -1 samples from "
        "all.",
    )
    rollout_stop: list[str] = Field(
        default_factory=list, description="Strings that end a turn, beside those of the generate hook."
    )
    rollout_max_concurrency: PositiveInt = Field(256, description="Most requests in flight to one engine.")
    rollout_workers: PositiveInt = Field(
        1,
        description="Processes that run the hooks. One runs them in the rollout process itself; more are for a machine "
        "with free cores where one core does not carry all trajectories. Limits of requests and searches under way "
        "are divided among them.",
    )
    dynamic_sampling_filter_path: str | None = Field(
        None,
        description="Filter, module.function(args, samples) -> bool: whether a group is trained on; other groups "
        "are replaced.",
    )
    update_weights_interval: PositiveInt = Field(
        1,
        description="Steps between updates of the engines' weights. With N > 1 the engines sample from a policy that "
        "is up to N - 1 steps old, and colocated engines keep their weights on the GPU while the trainer works. "
        "Weights are also sent at the start, before each evaluation and at the end.",
    )
    update_weights_through: Literal["tensor", "in_band", "distributed", "disk"] = Field(
        "tensor",
        description="How weights reach the engines. tensor: each trainer rank leaves them where its engine reads them, "
        "on the GPU that both use (CUDA IPC) or in shared memory, or sends them in requests where there is too little "
        "of that; in_band: always in requests, which is slow; distributed: broadcast over process groups (NCCL on "
        "GPUs), one for each pipeline stage, for engines on GPUs of their own; disk: as a Hugging Face folder under "
        "--run-dir, which the machines of all engines must see.",
    )
    max_failure_rate: Fraction = Field(
        0.2, description="Stop the run when more than this share of a step's samples failed or were aborted."
    )
    debug_rollout_only: bool = Field(
        False,
        description="Run without a trainer and its GPUs: generate and score --num-rollout steps with the weights of "
        "--hf-checkpoint, write trajectories and metrics, then end. No evaluation.",
    )
    debug_train_only: Path | None = Field(
        None,
        description="Run without engines: train on the samples of another run's journal. Names the folder of its "
        "checkpoints (--save). No evaluation. Leave the other flags as they were in that run.",
    )


class EvalArgs(Group):
    """Evaluation: the same hooks on held-out prompts, the same rows each time"""

    eval_interval: PositiveInt | None = Field(
        None, description="Steps between evaluations on --eval-prompt-data [never]."
    )
    eval_prompt_data: list[str] | None = Field(
        None,
        description="Evaluation sets, each a name and a file: NAME PATH [NAME PATH ...]; PATH@[a:b] takes rows a to b, "
        "and owner/set is the test.parquet of a data set on the Hugging Face hub.",
    )
    eval_input_key: str = Field(
        default_factory=lambda data: data["input_key"],
        description="Column of the evaluation files that holds the prompt [--input-key].",
    )
    eval_label_key: str = Field(
        default_factory=lambda data: data["label_key"],
        description="Column of the evaluation files that holds the label [--label-key].",
    )
    eval_data_source_filter: list[str] | None = Field(
        None,
        description="Evaluate only rows of --eval-prompt-data whose data_source column is one of these [all rows].",
    )
    n_samples_per_eval_prompt: PositiveInt = Field(1, description="Trajectories sampled for each evaluation prompt.")
    eval_temperature: list[Annotated[float, Field(ge=0.0)]] = Field(
        [0.0],
        min_length=1,
        description="Sampling temperatures of evaluation: every set is evaluated at each; 0 is greedy.",
    )
    eval_top_p: PositiveFraction = Field(
        1.0,
        description="Nucleus sampling in evaluation: sample from the likeliest tokens that together have this "
        "probability.",
    )
    eval_max_response_len: PositiveInt = Field(
        default_factory=lambda data: data["rollout_max_response_len"],
        description="Most new tokens of one turn in evaluation [--rollout-max-response-len].",
    )
    eval_only: bool = Field(
        False,
        description="Evaluate --eval-prompt-data once, with the weights of --load or, without it, of --hf-checkpoint, "
        "and end. There is no trainer, and flags of training have no effect; --prompt-data is not needed.",
    )
    eval_before_train: bool = Field(
        True, description="Evaluate before the first step of a new run, if it has evaluation sets."
    )


class EngineArgs(Group):
    """SGLang engines; beside these, --sglang-NAME takes any option NAME of SGLang's server, which checks it"""

    sglang_mem_fraction_static: PositiveFraction = Field(
        0.7, description="Share of a GPU's memory that an engine uses for weights and KV cache."
    )
    sglang_max_total_tokens: PositiveInt | None = Field(
        None, description="Tokens that an engine's KV cache holds [what fits; 65536 on a CPU]."
    )
    router: bool = Field(
        False,
        description="Send requests through SGLang's router (sglang-router, cache-aware), which looks for the engine "
        "whose prefix cache holds most of a request. It does not know trajectories and prompts: all turns of a "
        "trajectory, and the samples of a prompt, stay together only as far as it finds their beginnings. Without it "
        "Sleuth places them itself.",
    )
    sglang_dtype: DType | None = Field(None, description="Precision of the engines [that of --dtype].")
    sglang_options: dict[str, list[str]] = Field(
        default_factory=dict, exclude_if=lambda value: not value, description="Words of SGLang's own options, by name."
    )


class LimitArgs(Group):
    """Limits: how long a run waits before it gives up (docs/reliability.md has all of them)"""

    engine_timeout: PositiveFloat = Field(
        1800.0, description="Most seconds that one generation may take, its time in the engine's queue included."
    )
    sync_timeout: PositiveFloat = Field(
        900.0,
        description="Most seconds for an engine's answer while its weights are updated or its memory changes hands.",
    )
    train_timeout: PositiveFloat = Field(
        7200.0, description="Most seconds that the training on one step's data, or the saving of it, may take."
    )
    process_restarts: NonNegativeInt = Field(
        3,
        description="How often each engine, and each rollout process, is started again in a run after it has ended, or "
        "after an engine has not answered for 120 s. Engines that share GPUs with the trainer, or are behind --router, "
        "are not.",
    )
    restarts: NonNegativeInt = Field(
        0,
        description="With --save: how often the run starts itself again from its last checkpoint, after the end of a "
        "trainer process or of anything else that is not started again by itself, and after a limit of the above.",
    )


class HookArgs(Group):
    """Hooks: plain functions, named as module.function"""

    custom_generate_function_path: str | None = Field(
        None,
        description="Generate hook, which makes one trajectory: async generate(args, sample, sampling_params[, "
        "evaluation]) -> Sample [one generation, no environment].",
    )
    custom_rm_path: str | None = Field(
        None,
        description="Reward hook, which scores one trajectory: async reward_func(args, sample, **kwargs) -> float "
        "or dict of components. Required except in supervised training.",
    )
    custom_tis_function_path: str | None = Field(
        None,
        description="Hook that corrects for the mismatch between engine and trainer: tis(args, *, pg_loss, "
        "train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs) -> "
        "(pg_loss, loss_masks, metrics). Needs --use-tis [the built-in truncation].",
    )
    hook_timeout: PositiveFloat = Field(
        1800.0,
        description="Most seconds that the generate hook and the reward hook may each take for one sample.",
    )
    custom_config_path: list[Path] = Field(
        default_factory=list,
        description="YAML files with values for flags (keys with _ or -) and with sections for the hooks: those "
        "that the hooks declare (search_r1, mis) and custom. The command line wins over files, a later "
        "file over an earlier one. The flag may be repeated.",
    )
    custom_config: dict[str, Any] = Field(
        default_factory=dict,
        exclude_if=lambda value: not value,
        description="The hooks' sections of the files of --custom-config-path.",
    )


class SearchArgs(Group):
    """Search (all other settings of the search hook are in its YAML section, search_r1)"""

    search_backend: str | None = Field(
        None,
        description="Search backend: local, google, or a module.function of your own. Outranks the YAML section "
        "search_r1 [what the section or the hook says].",
    )
    search_url: str | None = Field(
        None,
        description="URL of the local retrieval server, such as http://127.0.0.1:8000/retrieve. Outranks the YAML "
        "section search_r1 [what the section or the hook says].",
    )
    search_check: bool = Field(
        True, description="Ask the search backend one question before the run starts, and stop if it does not answer."
    )


class LogArgs(Group):
    """Logs (console and metrics.jsonl are always written)"""

    use_tensorboard: bool = Field(False, description="Write TensorBoard files under --run-dir.")
    use_wandb: bool = Field(
        False,
        description="Log to Weights & Biases; its key comes from WANDB_API_KEY or WANDB_KEY. WANDB_MODE=offline keeps "
        "the run on this machine.",
    )
    wandb_project: str = Field("sleuth", description="Project of the run in Weights & Biases.")
    wandb_group: str | None = Field(None, description="Group of the run in Weights & Biases.")
    use_swanlab: bool = Field(
        False,
        description="Log to SwanLab; its key comes from SWANLAB_API_KEY. SWANLAB_MODE=offline keeps the run on this "
        "machine.",
    )
    swanlab_project: str = Field("sleuth", description="Project of the run in SwanLab.")
    use_trackio: bool = Field(False, description="Log to trackio, which keeps the run on this machine.")
    trackio_project: str = Field("sleuth", description="Project of the run in trackio.")
    log_trajectories: NonNegativeInt = Field(
        20, description="How many readable trajectories to keep of each step and each evaluation; 0 keeps none."
    )
