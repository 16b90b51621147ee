"""Passage retrieval over HTTP: the server that the local search backend asks."""
