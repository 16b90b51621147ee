"""`AllFlags`: every flag of a run in one class, and the sizes that follow from them.

Nothing here checks whether the flags fit together: `checks.py` does, called by `Args`.
"""

from __future__ import annotations

from sleuth.arguments.run_flags import (
    CheckpointArgs,
    ClusterArgs,
    DataArgs,
    EngineArgs,
    EvalArgs,
    HookArgs,
    LimitArgs,
    LogArgs,
    RolloutArgs,
    SearchArgs,
)
from sleuth.arguments.train_flags import (
    BatchArgs,
    LossArgs,
    ModelArgs,
    NumericsArgs,
    OptimizerArgs,
    ParallelArgs,
)


# Pydantic orders fields from the last base to the first. A computed default can use only the fields before it.
class AllFlags(
    LogArgs,
    SearchArgs,
    HookArgs,
    LimitArgs,
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
    """The values of all flags; the base classes list the fields."""

    @property
    def actor_world_size(self) -> int:
        """The number of trainer processes, one per GPU."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def data_parallel_size(self) -> int:
        """How many groups of trainer processes get different samples."""
        model_parallel = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        return self.actor_world_size // (model_parallel * self.context_parallel_size)

    @property
    def without_engines(self) -> bool:
        """Whether samples are read: in supervised training, and with --debug-train-only."""
        return self.loss_type == "sft" or self.debug_train_only is not None

    @property
    def num_engines(self) -> int:
        """The number of SGLang servers; 0 where samples are not generated."""
        return 0 if self.without_engines else (self.rollout_num_gpus or 0) // self.rollout_num_gpus_per_engine

    @property
    def total_gpus(self) -> int:
        """GPUs of the whole run; a GPU that engine and trainer share counts once."""
        rollout = self.num_engines * self.rollout_num_gpus_per_engine
        if not self.trains:
            return rollout
        return max(self.actor_world_size, rollout) if self.colocate else self.actor_world_size + rollout

    @property
    def trains(self) -> bool:
        """Whether there is a trainer."""
        return not (self.debug_rollout_only or self.eval_only)

    @property
    def samples_per_step(self) -> int:
        """The number of samples that one step trains on."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def optimizer_steps_per_step(self) -> int:
        return self.samples_per_step // self.global_batch_size

    @property
    def eval_sets(self) -> dict[str, str]:
        """The evaluation sets, from name to path (which may end in a slice, `@[a:b]`)."""
        pairs = self.eval_prompt_data or []
        return dict(zip(pairs[::2], pairs[1::2], strict=True))
