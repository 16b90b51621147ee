"""Where the parts of a run live: Ray, placement, the trainer's and the rollout's actors."""
