"""Settings of Python's garbage collector for a process that keeps many objects and handles many requests."""

from __future__ import annotations

import gc

THRESHOLD = 50_000
"""New containers until a collection, in place of Python's 700: one answer of an engine holds one for each token."""


def relax_garbage_collector() -> None:
    """Exempt all objects that exist now (prompts, libraries) from collection, and collect new ones seldom.

    A full collection goes through millions of objects that stay until the end, while every trajectory waits. Objects
    without reference cycles are freed at once in any case.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)
