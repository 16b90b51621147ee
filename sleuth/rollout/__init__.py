"""Generating trajectories: hooks in an event loop, the engines' client, batches for the trainer."""
