"""The trackers: TensorBoard, Weights & Biases, SwanLab and trackio. A package is imported only when it is used.

Each is a class with `log(step, values)` and `close()`; to add one, write it here, and its flag in `run_flags.py`.
A resumed run goes on in the run that it had in its folder, as far as the tracker can.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from sleuth.metrics.guard import Destination


class TrackerArgs(Protocol):
    """The arguments that the trackers read."""

    @property
    def num_rollout(self) -> int: ...
    @property
    def use_tensorboard(self) -> bool: ...
    @property
    def use_wandb(self) -> bool: ...
    @property
    def wandb_project(self) -> str: ...
    @property
    def wandb_group(self) -> str | None: ...
    @property
    def use_swanlab(self) -> bool: ...
    @property
    def swanlab_project(self) -> str: ...
    @property
    def use_trackio(self) -> bool: ...
    @property
    def trackio_project(self) -> str: ...
    def to_dict(self) -> dict[str, Any]: ...


class TensorBoard:
    """Files under `tensorboard/` of the run's folder."""

    def __init__(self, args: TrackerArgs, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        purge = first_step if first_step > 1 else None
        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases; `wandb_id.txt` holds the run's id. WANDB_MODE=offline keeps all of it in the run's folder."""

    def __init__(self, args: TrackerArgs, run_dir: Path, first_step: int) -> None:
        import wandb

        if key := os.environ.get("WANDB_KEY"):
            os.environ.setdefault("WANDB_API_KEY", key)
        id_file = run_dir / "wandb_id.txt"
        self._run: Any = wandb.init(
            project=args.wandb_project,
            group=args.wandb_group,
            dir=str(run_dir),
            config=args.to_dict(),
            id=_read(id_file),
            resume="allow",
        )
        self._run.define_metric("*", step_metric="step")  # a step logged in parts, or again, keeps its place
        id_file.write_text(self._run.id + "\n")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class SwanLab:
    """SwanLab; `swanlab_id.txt` holds the run's id. SWANLAB_MODE=offline (or local) keeps all in the run's folder."""

    def __init__(self, args: TrackerArgs, run_dir: Path, first_step: int) -> None:
        import swanlab

        id_file = run_dir / "swanlab_id.txt"
        known = _read(id_file)
        mode = os.environ.get("SWANLAB_MODE") or None
        online = mode in (None, "cloud", "online")  # only there can a run be taken up again
        options = {"id": known, "resume": "allow"} if known and online else {}
        self._run: Any = swanlab.init(
            project=args.swanlab_project,
            name=run_dir.name,
            config=args.to_dict(),
            log_dir=str(run_dir / "swanlab"),
            mode=mode,
            **options,
        )
        if online and isinstance(found := getattr(self._run, "id", None), str):
            id_file.write_text(found + "\n")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """trackio, which keeps its data on this machine (TRACKIO_DIR) and shows them with `trackio show`."""

    def __init__(self, args: TrackerArgs, run_dir: Path, first_step: int) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=args.trackio_project,
            name=run_dir.name,
            config=args.to_dict(),
            resume="allow" if first_step > 1 else "never",
            embed=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _read(path: Path) -> str | None:
    return path.read_text().strip() if path.exists() else None


CLASSES: dict[str, Callable[[TrackerArgs, Path, int], Destination]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "swanlab": SwanLab,
    "trackio": Trackio,
}
"""The class of each tracker; the flag `--use-<name>` turns it on, and its package has that name."""
