"""Compare the files of checkpoints with the checksums that were saved with them. Loads nothing; needs no GPU.

    python tools/verify_checkpoints.py checkpoints/first              all checkpoints of a folder
    python tools/verify_checkpoints.py checkpoints/first/iter_0000020

Prints a line for each checkpoint, and how long reading took. The exit code is 1 if one is damaged.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sleuth.checkpoints import checkpoint_folder, checkpoint_steps, is_checkpoint
from sleuth.manifest import MANIFEST, content_problems, read_manifest


def report(checkpoint: Path) -> tuple[bool, str]:
    """Whether nothing is wrong, and what to say."""
    began = time.monotonic()
    try:
        entries = read_manifest(checkpoint)
        problems = content_problems(checkpoint, entries or {})
    except ValueError as error:
        problems, entries = [str(error)], {}
    if problems:
        return False, "damaged: " + "; ".join(problems)
    if entries is None:
        return True, f"not verified: it was saved without a {MANIFEST}"
    size, seconds = sum(entry.bytes for entry in entries.values()) / 1e9, time.monotonic() - began
    return True, f"whole: {len(entries)} files, {size:.3f} GB, {seconds / size if size else 0:.2f} seconds per GB"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0] if __doc__ else None,
    )
    parser.add_argument("folder", type=Path, help="a folder of checkpoints (--save of a run), or one checkpoint")
    folder = parser.parse_args(argv).folder
    if is_checkpoint(folder):
        found = [folder]
    else:
        found = [checkpoint_folder(folder, step) for step in checkpoint_steps(folder)]
    if not found:
        sys.exit(f"error: expected checkpoints (iter_*) in {folder}, found none; name the --save of a run")
    reports = {checkpoint: report(checkpoint) for checkpoint in found}
    for checkpoint, (_, text) in reports.items():
        print(f"{checkpoint}: {text}")
    sys.exit(0 if all(well for well, _ in reports.values()) else 1)


if __name__ == "__main__":
    main()
