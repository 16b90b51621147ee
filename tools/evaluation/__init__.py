"""The parts of tools/eval.py and tools/analyse.py: answers on disk, what they depend on, numbers, servers."""
