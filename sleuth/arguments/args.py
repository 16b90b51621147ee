"""`Args`: the whole configuration of a run, resolved once, frozen, printed and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import model_validator

from sleuth.arguments.checks import find_problems
from sleuth.arguments.run_flags import (
    CheckpointArgs,
    ClusterArgs,
    DataArgs,
    EngineArgs,
    EvalArgs,
    HookArgs,
    LogArgs,
    RolloutArgs,
)
from sleuth.arguments.train_flags import (
    BatchArgs,
    LossArgs,
    ModelArgs,
    NumericsArgs,
    OptimizerArgs,
    ParallelArgs,
)


# Pydantic takes the fields of the last base first, and a default may be computed from fields before it.
class Args(
    LogArgs,
    HookArgs,
    NumericsArgs,
    ModelArgs,
    ParallelArgs,
    OptimizerArgs,
    BatchArgs,
    EngineArgs,
    EvalArgs,
    RolloutArgs,
    LossArgs,
    DataArgs,
    ClusterArgs,
    CheckpointArgs,
):
    """Every setting of a run; see the groups for the fields."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = find_problems(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def actor_world_size(self) -> int:
        """Processes (GPUs) that train."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def data_parallel_size(self) -> int:
        """Groups of trainer processes that see different samples."""
        model_parallel = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        return self.actor_world_size // (model_parallel * self.context_parallel_size)

    @property
    def num_engines(self) -> int:
        """SGLang servers; 0 in supervised training."""
        return 0 if self.loss_type == "sft" else (self.rollout_num_gpus or 0) // self.rollout_num_gpus_per_engine

    @property
    def total_gpus(self) -> int:
        """GPUs of the whole run: shared ones are counted once."""
        rollout = self.num_engines * self.rollout_num_gpus_per_engine
        return max(self.actor_world_size, rollout) if self.colocate else self.actor_world_size + rollout

    @property
    def samples_per_step(self) -> int:
        """Samples that a step trains on."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def optimizer_steps_per_step(self) -> int:
        return self.samples_per_step // self.global_batch_size

    @property
    def eval_sets(self) -> dict[str, str]:
        """Evaluation sets: name -> path with its optional slice."""
        pairs = self.eval_prompt_data or []
        return dict(zip(pairs[::2], pairs[1::2], strict=True))

    def to_dict(self) -> dict[str, Any]:
        """All values, as JSON can hold them. No secret is among them: keys come from the environment."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """All values in a form that `--custom-config-path` reads back."""
        values = self.to_dict()
        del values["custom_config_path"]
        custom = values.pop("custom_config", {})  # there, null is a value of its own
        flags = {key: value for key, value in values.items() if value is not None}
        return yaml.safe_dump({**flags, **custom}, sort_keys=False)

    def write(self, path: Path | str) -> None:
        """Write `to_yaml()` to `path`."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")
