"""Hands pages to processes that read them, so that no page holds up the event loop or its threads.

async with PageReaders() as readers:
    context = await readers.context(Page(data, charset="utf-8"), snippet)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

logger = logging.getLogger(__name__)

PARSE_SECONDS = 2.0
"""A page that takes longer is given up; an article of a megabyte takes a quarter of a second."""
START_SECONDS = 60.0
MOST_READERS = 4
ANSWER_BYTES = 1024 * 1024
PACKAGE_ROOT = Path(__file__).parents[2]
ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""All that a reader gets of our environment, which may hold keys."""


@dataclass(frozen=True, slots=True)
class Page:
    """The bytes of a page; `charset` is what its server declared, `cut`: it goes on beyond them."""

    data: bytes
    charset: str | None = None
    cut: bool = False


class PageReaders:
    """`count` processes [half of the CPUs, at most four]; a page that is read waits for a free one."""

    def __init__(self, count: int | None = None, *, seconds: float = PARSE_SECONDS) -> None:
        self.count = count or min(MOST_READERS, max(1, (os.cpu_count() or 1) // 2))
        self.seconds = seconds
        self.closed = False
        self._free: asyncio.Queue[Process | None] = asyncio.Queue()
        self._running: set[Process] = set()
        self._starting: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        """Begin to start the processes."""
        self._starting = [asyncio.create_task(self._start()) for _ in range(self.count)]
        self._tasks.update(self._starting)
        return self

    async def ready(self) -> None:
        """Wait until one of the processes has started: seconds, once."""
        if not any(task.done() for task in self._starting):
            await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)

    async def __aexit__(self, *exception: object) -> None:
        self.closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in [*self._running]:
            await self._end(process)

    async def context(self, page: Page, snippet: str) -> str | None:
        """What stands around the snippet in a page; None if it is not found, or cannot be read within the time."""
        return await self._read(page, {"snippet": snippet})

    async def relevant(self, page: Page, question: str) -> str | None:
        """The text of a page, what matters to the question first; None if it has none, or takes too long."""
        return await self._read(page, {"question": question})

    async def _read(self, page: Page, wanted: dict[str, str]) -> str | None:
        process = await self._free.get()
        task = asyncio.create_task(self._ask(process, page, wanted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)  # who does not wait for the answer leaves it to be read: the next comes after

    async def _ask(self, process: Process | None, page: Page, wanted: dict[str, str]) -> str | None:
        header = {"charset": page.charset, "cut": page.cut, "size": len(page.data), **wanted}
        try:
            if process is None:  # the last one died
                process = await self._launch()
            assert process.stdin is not None
            assert process.stdout is not None
            async with asyncio.timeout(self.seconds + START_SECONDS):  # it keeps to its own limit, if it runs at all
                process.stdin.write(json.dumps(header).encode() + b"\n" + page.data)
                await process.stdin.drain()
                answer = json.loads(await process.stdout.readline())
        except Exception as error:
            logger.debug("a page reader failed: %s: %s", type(error).__name__, error)
            if process is not None:
                await self._end(process)
            self._free.put_nowait(None)
            return None
        self._free.put_nowait(process)
        return answer["context"]

    async def _start(self) -> None:
        process = None
        try:
            process = await self._launch()
        except Exception as error:
            logger.warning("pages of search results cannot be read: %s: %s", type(error).__name__, error)
        self._free.put_nowait(process)

    async def _launch(self) -> Process:
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        paths = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sleuth.pages.reader", str(self.seconds)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            limit=ANSWER_BYTES,
            env=environment | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )
        self._running.add(process)
        assert process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            ready = await process.stdout.readline()
        if ready != b"ready\n":
            await self._end(process)
            raise RuntimeError(f"a page reader ended with exit code {process.returncode} before it was ready")
        return process

    async def _end(self, process: Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        self._running.discard(process)
