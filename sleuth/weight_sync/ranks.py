"""The trainer's processes during an update of weights: what they tell each other, so that none waits for ever.

ranks = Ranks.of_trainer()                     # or ALONE: a process that has all the weights
found = ranks.exchange(lambda: prepare())      # on every rank the results of all, or an error on every rank
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from sleuth.weight_sync.control import WeightSyncError

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process is `rank` of `size`; rank 0 leads: it alone pauses the engines and lets them continue."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of_trainer(cls) -> Ranks:
        """Those of torch's process group, whose ranks then all call `exchange` together."""
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def exchange(self, action: Callable[[], Result]) -> list[Result]:
        """Call `action` on every rank; returns all results, which are small, by rank.

        If it fails on a rank, that rank raises its error, the others a WeightSyncError that tells of it.
        """
        if self.size == 1:
            return [action()]
        failure: Exception | None = None
        result: Result | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        found: list[tuple[Result, str | None]] = [None] * self.size  # type: ignore[list-item]
        dist.all_gather_object(found, (result, None if failure is None else f"{type(failure).__name__}: {failure}"))
        if failure is not None:
            raise failure
        if errors := [f"trainer rank {rank}: {error}" for rank, (_, error) in enumerate(found) if error]:
            raise WeightSyncError("; ".join(errors), paused=True)
        return [value for value, _ in found]

    def give_up(self, error: Exception) -> None:
        """In place of an `exchange`: it fails with `error`, here and, as they are told, on the other ranks."""

        def fail() -> None:
            raise error

        self.exchange(fail)


ALONE = Ranks()
