"""The folders that a run writes to are its own: no other run uses them, and none left its results there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sleuth.arguments import Args
from sleuth.folder_lock import locked
from sleuth.metrics.jsonl import read_metrics


@contextmanager
def own_folders(args: Args) -> Iterator[None]:
    """Keep every other run out of --run-dir and --save while the body runs.

    Raises ValueError if another run is in one of them, or if --run-dir holds the metrics of another run and --load does
    not say that this one goes on from it.
    """
    named = {"--run-dir": args.run_dir, "--save": args.save}
    folders = {folder.resolve(): name for name, folder in reversed(named.items()) if folder is not None}
    with ExitStack() as stack:
        for folder, name in folders.items():
            stack.enter_context(locked(name, folder))
        _check_new(args, args.run_dir)
        yield


def _check_new(args: Args, run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    if (args.load is not None and not args.eval_only) or not path.is_file():
        return
    if lines := read_metrics(path):
        steps = [line["step"] for line in lines]
        raise ValueError(
            f"--run-dir: expected a folder without results for a new run, found the metrics of another one (steps "
            f"{steps[0]} to {steps[-1]}) in {run_dir}; --load CHECKPOINTS goes on from that run, or name another folder"
        )
