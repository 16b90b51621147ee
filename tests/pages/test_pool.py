"""Pages that are hard on the parsers, read by real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sleuth.pages.pool import Page, PageReaders
from sleuth.search.pages import PublicResolver

ROOT = Path(__file__).parents[2]
SENTENCE = "The largest city of Switzerland is Zurich, which lies at the lake of the same name."
GOOD = Page(f"<html><body><article><h1>City</h1><p>{SENTENCE}</p></article></body></html>".encode())
LINKS = Page(
    ("<html><body>" + "".join(f"<div><a href='/{n}'>link {n} to a page</a></div>" for n in range(40_000))).encode()
)
"""Takes trafilatura ten seconds and more."""
LIMIT = 4.0
"""Seconds: enough for GOOD on a busy machine, not for LINKS."""


def readers_of(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children(recursive=True) if "sleuth.pages.reader" in child.cmdline()]


def test_a_page_that_takes_too_long_is_given_up_and_holds_nothing_else() -> None:
    async def run() -> None:
        async with PageReaders(1, seconds=LIMIT) as readers:
            assert await readers.context(GOOD, "largest city of Switzerland") == SENTENCE
            start, ticks = time.monotonic(), 0
            hard = [asyncio.create_task(readers.context(LINKS, "nothing")) for _ in range(2)]
            while not all(task.done() for task in hard):
                await asyncio.sleep(0.01)
                ticks += 1
            assert [task.result() for task in hard] == [None, None]
            assert 2 * LIMIT <= time.monotonic() - start < 8 * LIMIT
            assert ticks > 50  # the event loop went on
            before = readers_of(os.getpid())
            assert await readers.context(GOOD, "largest city of Switzerland") == SENTENCE
            assert readers_of(os.getpid()) == before  # and nothing was started anew
        assert readers_of(os.getpid()) == []

    asyncio.run(run())


def test_who_does_not_wait_does_not_spoil_the_next_answer() -> None:
    async def run() -> None:
        async with PageReaders(1, seconds=LIMIT) as readers:
            await readers.ready()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await readers.context(LINKS, "nothing")
            assert await readers.context(GOOD, "largest city of Switzerland") == SENTENCE

    asyncio.run(run())


def test_a_reader_that_was_killed_is_replaced() -> None:
    async def run() -> None:
        async with PageReaders(1) as readers:
            await readers.ready()
            (process,) = readers_of(os.getpid())
            process.kill()
            process.wait()
            assert await readers.context(GOOD, "largest city") is None
            assert await readers.context(GOOD, "largest city") == SENTENCE

    asyncio.run(run())


def test_no_reader_outlives_who_started_it_however_that_ends() -> None:
    program = """
import asyncio, sys
from sleuth.pages.pool import Page, PageReaders
from tests.pages.test_pool import LINKS
async def run():
    async with PageReaders(2) as readers:
        await readers.ready()
        task = asyncio.create_task(readers.context(LINKS, "x"))
        await asyncio.sleep(0.3)
        print("reading", flush=True)
        await asyncio.sleep(60)
asyncio.run(run())
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 2
        process.send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []
    assert len(gone) == len(started)


def test_a_reader_sees_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "Pl4nted")

    async def run() -> None:
        async with PageReaders(1) as readers:
            await readers.ready()
            (process,) = readers_of(os.getpid())
            assert "SERPER_API_KEY" not in process.environ()

    asyncio.run(run())


def test_names_are_looked_up_in_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that nobody answers for take all of these threads, and none of the event loop's."""
    released = []

    def slow(*words: object, **options: object) -> list[object]:
        while not released:
            time.sleep(0.01)
        return []

    async def run() -> None:
        monkeypatch.setattr("socket.getaddrinfo", slow)
        resolver = PublicResolver()
        waiting = [asyncio.create_task(resolver.resolve(f"host{n}.example")) for n in range(40)]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(2):
            assert await asyncio.to_thread(lambda: "free") == "free"
        released.append(True)
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(run())
