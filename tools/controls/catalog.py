"""The list of controls: what each changes in the demo, and what a reader should conclude from it."""

from __future__ import annotations

from dataclasses import dataclass

HOOKS = "tools.controls.hooks"


@dataclass(frozen=True, slots=True)
class Control:
    """A variant of the demo: `flags` for train.py come after the demo's own, so they win.

    `expectation` says what should happen and what it would mean.
    """

    name: str
    title: str
    flags: tuple[str, ...]
    expectation: str


CONTROLS = (
    Control(
        "base",
        "the demo as it is",
        (),
        "Searches and exact match rise together, greedy too: reward teaches the habit to search.",
    ),
    Control(
        "shuffled",
        "rewards shuffled within each group",
        ("--dynamic-sampling-filter-path", f"{HOOKS}.shuffled_rewards"),
        "Must not learn: seeds must end on both sides of the start, for chance alone moves the policy. If all rose, "
        "the gain would come from training as such, not from who earned the reward.",
    ),
    Control(
        "format_reward",
        "reward for format alone",
        ("--custom-rm-path", f"{HOOKS}.format_reward"),
        "Format is nearly always valid from the start, so there is little to learn: searching must not rise for its "
        "own sake.",
    ),
    Control(
        "unrelated",
        "search returns unrelated passages",
        ("--search-backend", f"{HOOKS}.unrelated_search"),
        "Searching neither pays nor costs, so it may drift either way; exact match must stay where memory has it.",
    ),
    Control(
        "search_off",
        "search switched off",
        ("--custom-config-path", "tools/controls/search_off.yaml"),
        "Trying to search earns nothing, so the attempts vanish; exact match shows what can be had without passages.",
    ),
    Control(
        "no_mask",
        "passages are trained on as if the model had written them",
        ("--custom-rm-path", f"{HOOKS}.unmasked_reward"),
        "The difference to the demo is what the observation mask is worth at this size.",
    ),
    Control(
        "no_kl",
        "no KL loss",
        ("--no-use-kl-loss",),
        "The difference to the demo is what the KL term (0.001) does in 40 steps.",
    ),
    Control(
        "reinforce_pp",
        "REINFORCE++",
        ("--advantage-estimator", "reinforce_plus_plus"),
        "The same gain by another estimator: it is not GRPO's normalisation within groups that teaches.",
    ),
    Control(
        "dapo",
        "DAPO's settings: token-level loss, groups with equal rewards replaced, overlong shaping, no KL",
        (
            *("--no-use-kl-loss", "--calculate-per-token-loss"),
            *("--dynamic-sampling-filter-path", "sleuth.rollout.filters.nonzero_reward_std"),
            *("--overlong-buffer-len", "16", "--overlong-penalty-factor", "0.5"),
        ),
        "Groups that teach nothing are replaced, so the same steps may reach further, at more rollout.",
    ),
)
