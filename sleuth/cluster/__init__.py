"""Runs the parts of a run under Ray: placement, the actors of trainer and rollout, weight sync, checks before a run."""
