"""The checks of `tools/gpu_check.py`, which need torch and megatron-core alone."""
