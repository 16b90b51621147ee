"""An endless stream over rows, with a cursor that is saved and restored exactly.

The order of an epoch depends only on the seed and the number of the epoch, so the cursor needs no state of a random
generator.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

PARTS = 32
"""Into so many parts the rows are cut for their fingerprint, so that one can say where the data differ."""

Row = TypeVar("Row")


class RowStream(Generic[Row]):
    """An endless stream: each epoch gives every row once, in file order or in a new permutation.

    `state_dict()` can be written as JSON; after `load_state_dict` the stream continues with exactly the row that would
    have come next.
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
        self._fingerprint: list[str] | None = None

    @property
    def epoch(self) -> int:
        """The number of finished epochs."""
        return self._epoch

    def next_rows(self, count: int) -> list[Row]:
        """The next `count` rows; a new epoch may begin among them."""
        return [self._next() for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        """The cursor: `epoch`, `position` in it (rows), what decides the order, and the fingerprint of the rows."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "size": len(self._rows),
            "fingerprint": self.fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the row where `state` was saved. The saved seed and order replace those of this stream.

        Raises ValueError if the data are not those of the checkpoint: the cursor would mean nothing.
        """
        if difference := self._difference(state):
            raise ValueError(
                f"the checkpoint's data cursor is for {difference}; load the same --prompt-data (with the same slice, "
                "columns, filter, prompt template, chat template and context limit), or take only the weights of the "
                "checkpoint (--finetune loads weights alone)"
            )
        if (state["seed"], state["shuffle"]) != (self._seed, self._shuffle):
            logger.warning(
                "the data goes on in the checkpoint's order (seed %d, shuffle %s)", state["seed"], state["shuffle"]
            )
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._permutation()

    def fingerprint(self) -> list[str]:
        """The hashes of up to PARTS parts of the rows, in file order; computed once."""
        if self._fingerprint is None:
            size = self._part_size()
            starts = range(0, len(self._rows), size)
            self._fingerprint = [self._hash(self._rows[start : start + size]) for start in starts]
        return self._fingerprint

    def _part_size(self) -> int:
        return -(-len(self._rows) // PARTS)

    def _hash(self, rows: Sequence[Row]) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for row in rows:
            data = self._row_bytes(row)
            digest.update(b"%d:" % len(data))  # so that no byte can move from a row to the next unseen
            digest.update(data)
        return digest.hexdigest()

    def _row_bytes(self, row: Any) -> bytes:
        """Bytes that identify the content of a row, the same in every process."""
        return repr(row).encode("utf-8", "surrogatepass")

    def _difference(self, state: dict[str, Any]) -> str | None:
        """How the rows of `state` differ from these; None if nothing in `state` shows a difference."""
        size = len(self._rows)
        if state["size"] != size:
            return f"{state['size']} rows, but the data has {size}"
        saved = state.get("fingerprint")  # older checkpoints have none
        if saved is None or saved == self.fingerprint():
            return None
        part = next(i for i, (a, b) in enumerate(zip(saved, self.fingerprint(), strict=True)) if a != b)
        first = part * self._part_size()
        last = min(size, first + self._part_size()) - 1
        return f"other rows: of the {size}, the first that differ are among rows {first} to {last}"

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
