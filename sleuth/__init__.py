"""Sleuth: teaches language models to search, on a laptop's CPU or a GPU cluster alike."""
