"""Logging of a run's processes: everything to a file of its own, warnings to the terminal too."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(run_dir: Path, name: str) -> None:
    """Send this process's log records to `<run_dir>/logs/<name>.log`, warnings also to stderr."""
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(folder / f"{name}.log")
    to_terminal = logging.StreamHandler()
    to_terminal.setLevel(logging.WARNING)
    for handler in (to_file, to_terminal):
        handler.setFormatter(logging.Formatter(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_terminal], force=True)
    logging.captureWarnings(True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # Deprecation notices of the libraries inside are for their developers, not for a run's terminal.
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", FutureWarning)
