"""What is measured and where it goes: metrics of rollouts, the tracker, trajectories to read, plots."""
