"""What in a step's metrics says that the run cannot learn as it should: one sentence for each sign."""

from __future__ import annotations

from collections.abc import Mapping


def step_warnings(metrics: Mapping[str, float]) -> dict[str, str]:
    """The signs in the metrics of a step, by name; none where the metrics they need are missing."""
    found = {}
    groups = metrics.get("rollout/groups", 0)
    if metrics.get("rollout/samples", 0) > 1 and metrics.get("reward/std") == 0:
        found["constant reward"] = (
            f"every reward is {metrics['reward/mean']:.3g}, so there is nothing to learn from: look at trajectories "
            "(tools/view_trajectories.py), labels and reward hook"
        )
    elif 0 < groups == metrics.get("rollout/zero_variance_groups"):
        found["no signal"] = (
            f"in each of the {groups:.0f} groups all rewards are equal, so there is nothing to learn from: the prompts "
            "are too easy or too hard; take others, or more --n-samples-per-prompt"
        )
    if count := metrics.get("rollout/empty_labels", 0):
        found["empty labels"] = (
            f"{count:.0f} of {groups:.0f} prompts have a label without an answer: leave those rows out, or name "
            "another column with --label-key"
        )
    if count := metrics.get("rollout/repeated_prompts", 0):
        found["repeated prompts"] = (
            f"{count:.0f} of {groups:.0f} prompts came before in the same step: --prompt-data has fewer rows than "
            "--rollout-batch-size, or has rows twice"
        )
    return found
