"""Watches whether training can go on from the newest checkpoint: weights may be finite and yet be ruined.

The first loss that they give tells. If it is finite, and so is the gradient, the checkpoint is marked as a good one,
which is kept. If not, the one before it is what `--load` goes on from.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from sleuth import checkpoints


class NewestCheckpoint:
    """The newest checkpoint in `folder` (None: nothing is saved) that this trainer has saved or resumed from.

    Every rank has one and calls the same methods; rank 0 writes.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._step = self._optimizer_steps = -1

    def saved(self, step: int, optimizer_steps: int) -> None:
        """The weights of now are those of the checkpoint of `step`."""
        self._step, self._optimizer_steps = step, optimizer_steps

    def went_on(self) -> None:
        """A whole step was trained since."""
        if self.folder is None or self._step < 0:
            return
        if checkpoints.is_checkpoint(checkpoints.checkpoint_folder(self.folder, self._step)):  # written by now
            if dist.get_rank() == 0:
                checkpoints.mark_good(self.folder, self._step)
            self._step = -1

    def gave_up(self, optimizer_steps: int) -> str:
        """A loss or gradient was not finite after `optimizer_steps`; what that means for the checkpoint, as a sentence.

        "" if the weights had changed since it was saved.
        """
        if self.folder is None or self._step < 0 or optimizer_steps != self._optimizer_steps:
            return ""
        held = f". The checkpoint of step {self._step} in {self.folder} holds these weights"
        good = checkpoints.good_checkpoint(self.folder)
        if good is None:
            return f"{held}, and no other is known to be good: start anew, with a lower --lr or --clip-grad"
        if dist.get_rank() == 0:
            checkpoints.set_back(self.folder, self._step)
        return (
            f"{held}, so --load {self.folder} now goes on from {good.name}, the newest that training has gone on from; "
            "lower --lr or --clip-grad"
        )
