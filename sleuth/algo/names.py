"""The names that flags share with the algorithms. It imports nothing: `--help` must not wait for torch."""

from __future__ import annotations

from typing import Literal

Estimator = Literal[
    "grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "importance_sampling"
]
"""Choices of --advantage-estimator; `sleuth.algo.estimators` says what each does."""

KLKind = Literal["k1", "k2", "k3", "low_var_kl"]
"""Choices of --kl-loss-type and --kl-penalty-type; `sleuth.algo.losses.kl_estimate` has their formulas."""
