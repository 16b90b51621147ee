"""The mathematics of training, in pure torch: advantages, losses, packing, context-parallel layout."""
