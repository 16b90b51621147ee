"""Runs hooks and environments that were written for other frameworks."""
