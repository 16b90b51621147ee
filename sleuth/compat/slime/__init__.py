"""Hooks that were written for slime, run as they are.

A generate or reward hook whose file imports `slime` gets the stand-ins of this package (`names.py` lists them), a
sample of its own kind, and arguments with slime's names. What it returns becomes an ordinary sample
(`adapter.py`). docs/coming-from-slime.md says what differs.
"""
