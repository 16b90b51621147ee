"""Who has the GPUs' memory, where trainer and engines share them: the one place that knows the order.

| turn     | engines hold                   | trainer holds                 |
|----------|--------------------------------|-------------------------------|
| GENERATE | weights, KV cache, CUDA graphs |                               |
| TRAIN    |                                | weights, gradients, optimizer |
| SYNC     | weights                        | weights                       |
| SAVE     | weights                        | weights, gradients, optimizer |

From one turn to the next both first give what they no longer hold (engines only when they are idle and their caches
flushed), then both take what they hold now, then engines that hold everything continue. A step is so: engines idle ->
flush -> release -> trainer back -> log-probabilities, training -> gradients and optimizer out -> engines resume weights
-> sync -> trainer's weights out -> engines resume KV cache and graphs -> continue.

Engines that release their weights lose them, and need a sync. Where a sync does not follow every step they keep them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from sleuth.megatron.lending import Part  # megatron belongs into the trainer's processes

TRAINER_PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer")
ENGINE_PARTS = ("weights", "kv_cache", "cuda_graph")
"""SGLang's tags. Of cuda_graph it frees something only in engines that start for it: `engine_config` looks here.

It resumes graphs before weights before the KV cache, whatever the order of the tags, and its scheduler dies of one that
was not released: a turn resumes only what an earlier one released.
"""


PartT = TypeVar("PartT", bound=str)


class Turn(Enum):
    """What the memory is for."""

    GENERATE = "generate"
    TRAIN = "train"
    SYNC = "sync"
    SAVE = "save"


ENGINES_HOLD: Mapping[Turn, tuple[str, ...]] = {
    Turn.GENERATE: ENGINE_PARTS,
    Turn.TRAIN: (),
    Turn.SYNC: ("weights",),
    Turn.SAVE: ("weights",),
}
TRAINER_HOLDS: Mapping[Turn, tuple[Part, ...]] = {
    Turn.GENERATE: (),
    Turn.TRAIN: TRAINER_PARTS,
    Turn.SYNC: ("weights",),
    Turn.SAVE: TRAINER_PARTS,
}


class EngineSide(Protocol):
    """All engines of a run."""

    def hold_still(self) -> None:
        """Take no new requests, wait for the end of those under way, flush the caches."""
        ...

    def release(self, parts: tuple[str, ...]) -> None: ...

    def resume(self, parts: tuple[str, ...]) -> None: ...

    def go_on(self) -> None:
        """Take requests again."""
        ...


class TrainerSide(Protocol):
    """All ranks of the trainer."""

    def lend(self, parts: tuple[Part, ...]) -> None: ...

    def take_back(self, parts: tuple[Part, ...]) -> None: ...


class MemoryTurns:
    """The memory of the GPUs that `engines` and `trainer` share. It starts with GENERATE, all the trainer's lent.

    `keep_weights`: engines keep their weights in every turn, since no sync may follow that brings them back.
    An error leaves the turn as it is: a run does not go on from there.
    """

    def __init__(self, engines: EngineSide, trainer: TrainerSide, *, keep_weights: bool) -> None:
        self._engines, self._trainer = engines, trainer
        self._keep = ("weights",) if keep_weights else ()
        self.turn = Turn.GENERATE

    def turn_to(self, turn: Turn) -> None:
        """Let the memory be for `turn`; does nothing where it is already."""
        if turn is self.turn or (self.turn, turn) == (Turn.TRAIN, Turn.SAVE):  # in which all is there to be saved
            return
        engines, wanted = self._engine_parts(self.turn), self._engine_parts(turn)
        trainer, needed = TRAINER_HOLDS[self.turn], TRAINER_HOLDS[turn]
        assert "weights" in engines or turn is Turn.SYNC, f"a sync must come between {self.turn} and {turn}"
        if released := _without(engines, wanted):
            if self.turn is Turn.GENERATE:
                self._engines.hold_still()
            self._engines.release(released)
        if lent := _without(trainer, needed):
            self._trainer.lend(lent)
        if returned := _without(needed, trainer):
            self._trainer.take_back(returned)
        if resumed := _without(wanted, engines):
            self._engines.resume(resumed)
        if turn is Turn.GENERATE:
            self._engines.go_on()
        self.turn = turn

    def _engine_parts(self, turn: Turn) -> tuple[str, ...]:
        return self._keep + _without(ENGINES_HOLD[turn], self._keep)


def _without(parts: tuple[PartT, ...], others: tuple[PartT, ...]) -> tuple[PartT, ...]:
    return tuple(part for part in parts if part not in others)
