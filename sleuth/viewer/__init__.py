"""A page that shows runs: curves, steps, groups, and trajectories token by token. `python -m sleuth.viewer runs/...`"""
