"""The parts of tools/eval.py and tools/analyse.py: the model, answers on disk, what they depend on, numbers."""
