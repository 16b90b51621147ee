"""Python's garbage collector in a process that holds much for long and answers many requests."""

from __future__ import annotations

import gc

THRESHOLD = 50_000
"""New containers until a collection, in place of Python's 700: one answer of an engine holds one for each token."""


def relax_garbage_collector() -> None:
    """Never look again through what exists now (prompts, libraries), and seldom through what is new.

    A full collection goes through millions of objects that stay until the end, while every trajectory waits. What has
    no cycles is freed at once in any case.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)
