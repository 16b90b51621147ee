"""An endless stream over rows, with a cursor that is saved and restored exactly.

The order of an epoch depends on the seed and the epoch's number alone, so the cursor is three numbers and
no generator state.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

Row = TypeVar("Row")


class RowStream(Generic[Row]):
    """Gives rows for ever: each epoch has every row once, in file order or in a fresh permutation.

    `state_dict()` is JSON-able; after `load_state_dict` the stream goes on with exactly the row that would have
    come next.
    """

    def __init__(self, rows: Sequence[Row], *, seed: int, shuffle: bool) -> None:
        if not rows:
            raise ValueError("expected at least one row of data, found none")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._permutation()

    @property
    def epoch(self) -> int:
        """Epochs finished."""
        return self._epoch

    def next_rows(self, count: int) -> list[Row]:
        """The next `count` rows; an epoch's end may fall among them."""
        return [self._next() for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        """The cursor: `epoch`, `position` in it (rows), and what the order depends on."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "size": len(self._rows),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. The saved seed and order hold, whatever this stream was made with.

        Raises ValueError if the data has another number of rows: the cursor would mean nothing.
        """
        if state["size"] != len(self._rows):
            raise ValueError(
                f"the checkpoint's data cursor is for {state['size']} rows, but the data has {len(self._rows)}; "
                "load the same --prompt-data (and filter, and context limit), or start without --load"
            )
        if (state["seed"], state["shuffle"]) != (self._seed, self._shuffle):
            logger.warning(
                "the data goes on in the checkpoint's order (seed %d, shuffle %s)", state["seed"], state["shuffle"]
            )
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._permutation()

    def _next(self) -> Row:
        if self._position == len(self._rows):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._permutation()
        row = self._rows[self._order[self._position]]
        self._position += 1
        return row

    def _permutation(self) -> list[int]:
        order = list(range(len(self._rows)))
        if self._shuffle:
            # Seeding by text goes through SHA-512: neighbouring seeds and epochs are unrelated.
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order
