"""Logging in the processes of a run: each writes everything to its own file, and warnings to the terminal, too."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import ray

from sleuth.arguments import Args
from sleuth.metrics.console import ProgressSafeHandler
from sleuth.sample import shortened
from sleuth.secrets import hide, redact

logger = logging.getLogger(__name__)

LONGEST_RECORD = 20_000
"""Characters; some errors quote a whole page."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Formatter(logging.Formatter):
    """Records of bounded length without the secrets of the run, those in tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        text = redact(super().format(record))
        if len(text) <= LONGEST_RECORD:
            return text
        half = LONGEST_RECORD // 2  # the end of a traceback says most
        return f"{text[:half]}\n... ({len(text)} characters) ...\n{text[-half:]}"


def configure_logging(run_dir: Path, name: str, args: Args | None = None) -> None:
    """Send this process's log records to `<run_dir>/logs/<name>.log`, warnings also to stderr.

    The secrets of `args`, where they are not known to this process yet, are kept out of them.
    """
    hide(*(() if args is None else args.model_dump(mode="json").values()))
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(folder / f"{name}.log")
    to_terminal = ProgressSafeHandler()
    to_terminal.setLevel(logging.WARNING)
    # Warnings by Python's `warnings` come from libraries: they belong in the file, not on the terminal.
    to_terminal.addFilter(lambda record: record.name != "py.warnings")
    for handler in (to_file, to_terminal):
        handler.setFormatter(_Formatter(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_terminal], force=True)
    logging.captureWarnings(True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def failure_message(error: Exception, run_dir: Path) -> str:
    """One line for the terminal that says why the run ended; the traceback goes to the driver's log.

    For an error in an actor it is the message of the original error, without Ray's wrapping.
    """
    logger.info("the run ended with an error", exc_info=error)
    cause = getattr(error, "cause", None) or error
    told = _death(cause, run_dir) or shortened(f"{type(cause).__name__}: {cause}", LONGEST_RECORD // 2)
    return f"error: {redact(told)}\n(traceback: {run_dir / 'logs' / 'driver.log'})"


def _death(error: Exception, run_dir: Path) -> str | None:
    """One line about a killed actor, in place of Ray's many; None for other errors."""
    found = re.search(r"class_name: (\w+).*?pid: (\d+)", str(error), re.DOTALL)
    if not isinstance(error, ray.exceptions.RayActorError) or not found or "creation task" in str(error):
        return None
    return (
        f"expected {found[1]} (process {found[2]}) to live until the end, found it dead: killed, or out of memory "
        f"(its log is in {run_dir / 'logs'}); start again, with --load and the folder of --save to go on from the last "
        "checkpoint"
    )
