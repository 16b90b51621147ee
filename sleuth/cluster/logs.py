"""Logging in the processes of a run: each writes everything to its own file, and warnings to the terminal, too."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import ray

from sleuth.arguments import Args
from sleuth.checkpoints import saved_step
from sleuth.metrics.console import ProgressSafeHandler
from sleuth.paths import full_folder
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


class _LogFile(logging.FileHandler):
    """A file; where it cannot be written to, because the disk is full, the terminal is told so once."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            what = full_folder(error, Path(self.baseFilename).parent) or error
            sys.stderr.write(f"the log {self.baseFilename} cannot be written: {what}\n")


def configure_logging(run_dir: Path, name: str, args: Args | None = None) -> None:
    """Send this process's log records to `<run_dir>/logs/<name>.log`, warnings also to stderr.

    The secrets of `args`, where they are not known to this process yet, are kept out of them.
    """
    hide(*(() if args is None else args.model_dump(mode="json").values()))
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    to_file = _LogFile(folder / f"{name}.log")
    to_terminal = ProgressSafeHandler()
    to_terminal.setLevel(logging.WARNING)
    # Warnings by Python's `warnings` come from libraries: they belong in the file, not on the terminal.
    to_terminal.addFilter(lambda record: record.name != "py.warnings")
    for handler in (to_file, to_terminal):
        handler.setFormatter(_Formatter(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_terminal], force=True)
    logging.captureWarnings(True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def failure_message(error: Exception, run_dir: Path, save: Path | None = None) -> str:
    """A line for the terminal that says why the run ended; the traceback goes to the driver's log, which is named next.

    If `save` holds a checkpoint, a last line says that a run can go on from it.
    """
    logger.info("the run ended with an error", exc_info=error)
    lines = [f"error: {reason(error, run_dir)}", f"(traceback: {run_dir / 'logs' / 'driver.log'})"]
    return "\n".join([*lines, *_way_on(save)])


def reason(error: Exception, run_dir: Path) -> str:
    """Why a run ended; for an error in an actor the message of the original error, without Ray's wrapping."""
    cause = getattr(error, "cause", None) or error
    told = (
        _death(cause, run_dir)
        or full_folder(cause, run_dir)
        or shortened(f"{type(cause).__name__}: {cause}", LONGEST_RECORD // 2)
    )
    return redact(shortened(told, LONGEST_RECORD // 2))


def _way_on(save: Path | None) -> Iterator[str]:
    with suppress(ValueError):  # a tracker that names no checkpoint
        if save is not None and (step := saved_step(save)) is not None:
            yield f"--load {save} goes on from step {step}, its newest checkpoint"


def _death(error: Exception, run_dir: Path) -> str | None:
    """One line about a killed actor, in place of Ray's many; None for other errors."""
    found = re.search(r"class_name: (\w+).*?pid: (\d+)", str(error), re.DOTALL)
    if not isinstance(error, ray.exceptions.RayActorError) or not found or "creation task" in str(error):
        return None
    return (
        f"expected {found[1]} (process {found[2]}) to live until the end, found it dead: killed, or out of memory "
        f"(its log is in {run_dir / 'logs'}); start again"
    )
