"""Makes training batches from the samples of another run's journal (`--debug-train-only`), without engines."""

from __future__ import annotations

from typing import Any

from sleuth.arguments import Args
from sleuth.metrics.rollout_metrics import rollout_metrics
from sleuth.rollout.journal import journal_of, read_step, step_file, step_files
from sleuth.rollout.manager import StepData, WithoutEngines
from sleuth.rollout.reward_shaping import shape_rewards
from sleuth.rollout.train_batches import shard_batch, train_samples


class ReplayManager(WithoutEngines):
    """As RolloutManager, but every sample is there already."""

    def __init__(self, args: Args) -> None:
        assert args.debug_train_only is not None
        self.args, self.folder = args, journal_of(args.debug_train_only)
        self._state: dict[str, Any] = {}

    def connect(
        self, engine_urls: list[str], state: dict[str, Any], router_url: str | None = None, *, again: bool = False
    ) -> None:
        """Nothing to connect to; a step's samples do not depend on the `state` of a checkpoint."""
        self._state = state

    def generate(self, step: int) -> StepData:
        """The samples of `step`. Raises ValueError if the journal does not have all of them."""
        record = read_step(step_file(self.folder, step))
        if record is None or record.kept is None:
            there = [str(other) for other in step_files(self.folder)]
            found = "none of it" if record is None else f"{len(record.samples)} samples of a step that did not end"
            raise ValueError(
                f"--debug-train-only: expected step {step} in the journal {self.folder}, found {found}; it has steps "
                f"{there[0]} to {there[-1]}: change --num-rollout, or --load the checkpoint before them"
                if there
                else f"--debug-train-only: expected a journal in {self.folder}, found none; name the --save of a run"
            )
        self._state = record.state
        groups = record.groups
        samples = [sample for group in groups for sample in group]
        metrics = shape_rewards(self.args, samples) | rollout_metrics(samples)
        del metrics["rollout/empty_labels"]  # labels are in the prompt data, which is not read here
        return StepData(shard_batch(self.args, train_samples(self.args, groups)), metrics)

    def state_dict(self) -> dict[str, Any]:
        """The rollout's state after the last step, as the run that generated its samples would save it."""
        return self._state
