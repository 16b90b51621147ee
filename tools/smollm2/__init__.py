"""What `run_smollm2.sh` needs besides the kit: the model's folder, and the trajectories of its warm-up."""
