"""How far a run is, what of it a checkpoint holds, and the sentences that say so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Progress:
    """Steps of a run. `done` are trained and whole; `saved` of them lie in the checkpoint under `folder`.

    `step` is the one that was last begun, or where the run started. Without a checkpoint `saved` is 0, `folder` None.
    """

    step: int
    done: int
    saved: int
    folder: Path | None
    resumed: int = 0
    """The step of the checkpoint from which the run has started."""

    @classmethod
    def start(cls, steps_done: int, loaded: Path | None) -> Progress:
        """The progress of a run that goes on after the `steps_done` steps (0: none) of the checkpoint in `loaded`."""
        return cls(steps_done, steps_done, steps_done, loaded if steps_done else None, steps_done)

    def interrupted(self) -> str:
        """What an interrupted run tells: where it was, what is lost, what it can be taken up from."""
        if self.step > self.done:
            when = f"interrupted in step {self.step}"
        else:
            when = f"interrupted after step {self.done}" if self.done else "interrupted before step 1"
        lost = _steps(self.saved + 1, self.done)
        goes_on = f"--load {self.folder} goes on from it"
        if lost and self.folder:
            return f"{when}; {lost} not saved: the last checkpoint is step {self.saved} of {self.folder}; {goes_on}"
        if lost:
            return f"{when}; {lost} not saved: there is no checkpoint"
        if self.folder:
            return f"{when}; step {self.saved} is saved in {self.folder}; {goes_on}"
        return f"{when}; no step is done, and there is no checkpoint"


def _steps(first: int, last: int) -> str:
    """`step 5 is`, `steps 5 and 6 are`, `steps 5 to 7 are`; nothing for none."""
    count = last - first + 1
    if count <= 1:
        return f"step {first} is" if count == 1 else ""
    return f"steps {first} {'and' if count == 2 else 'to'} {last} are"
