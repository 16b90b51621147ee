"""What is run: devices, checkpoints, data, rollouts, evaluation, engines, hooks and logs.

One class a group of flags. A class's docstring heads its group in `--help`, a field's description is
the help of its flag, and `hf_checkpoint` is `--hf-checkpoint`. How the model is trained stands in
`train_flags.py`; what must hold between fields in `checks.py`.
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
    """Common settings of the groups: frozen, and an unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False, allow_inf_nan=False)


def _from_json(value: Any) -> Any:
    """A JSON object given as text on the command line; anything else as it is."""
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
        description="Frozen reference, and where the actor starts unless --load has a checkpoint: a Hugging Face "
        "folder of the same shape, or a torch_dist checkpoint.",
    )
    load: Path | None = Field(
        None,
        description="torch_dist checkpoint to resume from; the folder of --save may still be empty.",
    )
    finetune: bool = Field(
        False,
        description="Take only the weights of --load: a new run, from step 1 and the data's first row, with a new "
        "optimizer.",
    )
    save: Path | None = Field(None, description="Folder for checkpoints; without it nothing is saved.")
    save_interval: PositiveInt = Field(20, description="Steps between checkpoints; the last step is always saved.")
    save_keep: NonNegativeInt = Field(3, description="How many of the latest checkpoints to keep; 0 keeps all.")
    save_on_exit: bool = Field(
        True,
        description="On ctrl-C or SIGTERM save the last whole step first, within 60 s, where --save is given.",
    )
    run_dir: Path = Field(
        default_factory=_start_time_folder,
        description="Folder for logs, metrics and trajectories of this run [runs/<UTC start time>].",
    )


class ClusterArgs(Group):
    """Devices (on a machine without GPUs, read "process" for "GPU")"""

    actor_num_nodes: PositiveInt = Field(1, description="Nodes that train.")
    actor_num_gpus_per_node: PositiveInt = Field(1, description="GPUs that train, on each of those nodes.")
    colocate: bool = Field(
        False,
        description="Engines and trainer share their GPUs, the engines releasing their memory while the trainer works: "
        "the run takes max(training, rollout) GPUs, not their sum.",
    )
    rollout_num_gpus: PositiveInt | None = Field(
        default_factory=lambda data: _colocated_gpus(data),
        description="GPUs of all engines together [with --colocate: as many as train].",
    )
    rollout_num_gpus_per_engine: PositiveInt = Field(1, description="GPUs of one engine (its tensor parallelism).")
    ray_address: str | None = Field(
        None, description="Ray cluster to join, for example auto [RAY_ADDRESS if set, else a local one is started]."
    )
    cpu_threads_per_actor: PositiveInt | None = Field(
        None, description="CPU threads of one trainer process, without GPUs [cores / processes]."
    )


def _colocated_gpus(data: dict[str, Any]) -> int | None:
    return data["actor_num_nodes"] * data["actor_num_gpus_per_node"] if data["colocate"] else None


class DataArgs(Group):
    """Prompt data"""

    prompt_data: str = Field(description="Parquet or JSONL file of the training prompts; path@[a:b] takes rows a to b.")
    input_key: str = Field("prompt", description="Column of the prompt: a string or a list of messages.")
    label_key: str = Field("reward_model", description="Column of the label, handed to the reward hook as it is.")
    metadata_key: str = Field("metadata", description="Column of a dictionary handed to the hooks; may be absent.")
    tool_key: str | None = Field(None, description="Column of the tools offered to the chat template.")
    apply_chat_template: bool = Field(False, description="Render prompts with the tokenizer's chat template.")
    apply_chat_template_kwargs: JsonObject = Field(
        default_factory=dict, description="JSON object of further arguments of the chat template."
    )
    data_source_filter: list[str] | None = Field(
        None, description="Keep only rows whose data_source column is one of these [all rows]."
    )
    rollout_shuffle: bool = Field(False, description="Shuffle the training prompts anew in every epoch, by --seed.")


class RolloutArgs(Group):
    """Rollout: how trajectories are sampled"""

    num_rollout: PositiveInt = Field(3000, description="Steps of the run: each is one rollout and the training on it.")
    rollout_batch_size: PositiveInt = Field(32, description="Prompts of a step (in supervised training: samples).")
    n_samples_per_prompt: PositiveInt = Field(
        default_factory=lambda data: 1 if data.get("loss_type") == "sft" else 8,
        description="Trajectories sampled for each prompt: its group [8; 1 in supervised training].",
    )
    rollout_max_response_len: PositiveInt = Field(512, description="New tokens of one turn, at most.")
    rollout_max_context_len: PositiveInt | None = Field(
        None, description="Tokens of a whole trajectory, prompt included, at most [the model's own limit]."
    )
    rollout_temperature: Annotated[float, Field(gt=0.0)] = Field(
        1.0, description="Sampling temperature; the trainer scores at the same one."
    )
    rollout_top_p: PositiveFraction = Field(1.0, description="Nucleus sampling: probability mass kept.")
    rollout_top_k: TopK = Field(-1, description="Tokens kept when sampling, also in evaluation; -1 keeps all.")
    rollout_stop: list[str] = Field(
        default_factory=list, description="Further stop strings, beside those of the generate hook."
    )
    rollout_max_concurrency: PositiveInt = Field(256, description="Requests in flight per engine, at most.")
    dynamic_sampling_filter_path: str | None = Field(
        None, description="module.function(args, samples) -> bool: whether a group is trained on."
    )
    update_weights_interval: PositiveInt = Field(
        1,
        description="Steps between updates of the engines' weights; above 1 they sample from a policy that lags by up "
        "to one step less. Weights also go at the start, before an evaluation and at the end. Above 1 "
        "colocated engines keep their weights on the GPU while the trainer works.",
    )
    update_weights_through: Literal["tensor", "disk"] = Field(
        "tensor",
        description="How weights reach the engines: tensor sends them in requests; disk writes a Hugging Face folder "
        "under --run-dir, which the engines load: all of their machines must see it.",
    )
    max_failure_rate: Fraction = Field(
        0.2, description="The run stops when more than this share of a step's samples failed or were aborted."
    )
    debug_rollout_only: bool = Field(
        False,
        description="Generate and score --num-rollout steps with the weights of --hf-checkpoint, write trajectories "
        "and metrics, and end: no trainer, no GPUs for one, no evaluation.",
    )


class EvalArgs(Group):
    """Evaluation: the same hooks on held-out prompts, the same rows each time"""

    eval_interval: PositiveInt | None = Field(None, description="Steps between evaluations [never].")
    eval_prompt_data: list[str] | None = Field(
        None, description="Evaluation sets as pairs: NAME PATH@[a:b] [NAME PATH ...]."
    )
    eval_input_key: str = Field(
        default_factory=lambda data: data["input_key"], description="Column of the prompt [--input-key]."
    )
    eval_label_key: str = Field(
        default_factory=lambda data: data["label_key"], description="Column of the label [--label-key]."
    )
    n_samples_per_eval_prompt: PositiveInt = Field(1, description="Trajectories sampled for each evaluation prompt.")
    eval_temperature: list[Annotated[float, Field(ge=0.0)]] = Field(
        [0.0], min_length=1, description="Sampling temperatures, each evaluated; 0 is greedy."
    )
    eval_top_p: PositiveFraction = Field(1.0, description="Nucleus sampling in evaluation.")
    eval_max_response_len: PositiveInt = Field(
        default_factory=lambda data: data["rollout_max_response_len"],
        description="New tokens of one turn in evaluation, at most [--rollout-max-response-len].",
    )
    eval_before_train: bool = Field(True, description="Evaluate before the first step, if evaluation is on.")


class EngineArgs(Group):
    """SGLang engines"""

    sglang_mem_fraction_static: PositiveFraction = Field(
        0.7, description="Share of GPU memory for an engine's weights and KV cache."
    )
    sglang_max_total_tokens: PositiveInt | None = Field(
        None, description="Tokens of an engine's KV cache [what fits; 65536 on a CPU]."
    )
    sglang_dtype: DType | None = Field(None, description="Precision of the engines [as --dtype].")


class HookArgs(Group):
    """Hooks: plain functions, named as module.function"""

    custom_generate_function_path: str | None = Field(
        None,
        description="async generate(args, sample, sampling_params[, evaluation]) -> Sample: makes one trajectory "
        "[one generation, no environment].",
    )
    custom_rm_path: str | None = Field(
        None,
        description="async reward_func(args, sample, **kwargs) -> float or dict of components: scores one trajectory. "
        "Required, but for supervised training.",
    )
    custom_tis_function_path: str | None = Field(
        None,
        description="tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, "
        "response_lengths, **kwargs) -> (pg_loss, loss_masks, metrics): corrects for the mismatch between engine and "
        "trainer; needs --use-tis [the built-in truncation].",
    )
    hook_timeout: PositiveFloat = Field(
        1800.0,
        description="Seconds that the generate hook and the reward hook may each take for one sample, at most.",
    )
    custom_config_path: list[Path] = Field(
        default_factory=list,
        description="YAML files with values for any flag (keys with _ or -), merged before validation: the command "
        "line wins over them, a later file over an earlier one. Sections that the hooks declare (search_r1, mis) and "
        "the section custom go to the hooks. The flag may be repeated.",
    )
    custom_config: dict[str, Any] = Field(
        default_factory=dict, exclude_if=lambda value: not value, description="The hooks' own part of those files."
    )


class SearchArgs(Group):
    """Search: the settings of the search hooks that are flags, too; further ones stand in their section (search_r1)"""

    search_backend: str | None = Field(
        None, description="Search backend: local, google, or module.function of your own [the hook's own setting]."
    )
    search_url: str | None = Field(
        None, description="URL of the local retrieval server, such as http://127.0.0.1:8000/retrieve [the hook's own]."
    )
    search_check: bool = Field(True, description="Ask the search backend one question before the run starts.")


class LogArgs(Group):
    """Logs (console and metrics.jsonl are always written)"""

    use_tensorboard: bool = Field(False, description="Write TensorBoard files under --run-dir.")
    use_wandb: bool = Field(False, description="Log to Weights & Biases; its key comes from WANDB_API_KEY.")
    wandb_project: str = Field("sleuth", description="Weights & Biases project.")
    wandb_group: str | None = Field(None, description="Weights & Biases group of runs.")
    log_trajectories: NonNegativeInt = Field(
        20, description="Readable trajectories kept of each step and each evaluation; 0 keeps none."
    )
