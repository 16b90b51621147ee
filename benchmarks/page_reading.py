"""How fast web pages are read, and for how long they hold up the event loop.

    python -m benchmarks.page_reading [--pages 100] [--hard 8]

Ours: `sleuth.pages.pool`, processes that are killed at a limit. Reference: the same parsers in the event loop's
threads, which nothing can stop. Either is waited for at most five seconds, as a page of a search is. Articles of
100 kB first, read eight at once; then pages of nothing but links, a megabyte each, and how long it is until everything
that they began has ended. The last line is one JSON object; its ratio is articles per second, ours / reference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from benchmarks.options import whole_number
from sleuth.pages.pool import Page, PageReaders
from sleuth.pages.text import decode_page, snippet_context

AT_ONCE = 8
PAGE_SECONDS = 5.0
SENTENCE = "The largest city of Switzerland is Zurich, and this sentence goes on, so that it makes a usual paragraph. "
Read = Callable[[Page], Awaitable[str | None]]


def article(size: int) -> Page:
    return Page(f"<html><body><article><p>{f'{SENTENCE}</p><p>' * (size // len(SENTENCE))}</p></article>".encode())


def links(size: int) -> Page:
    return Page(("<html><body>" + "<div><a href='/page'>a link to a page</a></div>" * (size // 50)).encode())


async def in_a_thread(page: Page) -> str | None:
    return await asyncio.to_thread(lambda: snippet_context(decode_page(page.data), "largest city"))


async def measure(read: Read, pages: list[Page]) -> tuple[float, float]:
    """Seconds for all pages, and the longest time in which the event loop did nothing else."""
    places, longest, done = asyncio.Semaphore(AT_ONCE), 0.0, asyncio.Event()

    async def one(page: Page) -> None:
        async with places:
            with suppress(TimeoutError):
                async with asyncio.timeout(PAGE_SECONDS):
                    await read(page)

    async def watch() -> None:
        nonlocal longest
        while not done.is_set():
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            longest = max(longest, time.perf_counter() - before)

    watching = asyncio.create_task(watch())
    start = time.perf_counter()
    await asyncio.gather(*map(one, pages))
    seconds = time.perf_counter() - start
    done.set()
    await watching
    return seconds, longest


def trial(name: str, count: int, hard: int) -> float:
    """Articles a second."""

    async def run() -> tuple[float, float, float, float]:
        async with PageReaders() as readers:
            await readers.ready()
            read: Read = in_a_thread if name == "threads" else lambda page: readers.context(page, "largest city")
            await read(article(1000))
            return *await measure(read, [article(100_000)] * count), *await measure(read, [links(1_000_000)] * hard)

    start = time.perf_counter()
    articles, stall, hard_seconds, hard_stall = asyncio.run(run())
    print(
        f"{name}: {count / articles:.1f} articles/s, event loop held for at most {stall:.3f} s; pages of links: "
        f"{hard_seconds:.1f} s, held for {hard_stall:.3f} s, all over after {time.perf_counter() - start:.1f} s"
    )
    return count / articles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=whole_number(), default=100, help="articles [100]")
    parser.add_argument("--hard", type=whole_number(), default=8, help="pages of links [8]")
    options = parser.parse_args()
    reference, ours = (trial(name, options.pages, options.hard) for name in ("threads", "processes"))
    result = {"name": "page_reading", "ratio": round(ours / reference, 3)}
    print(json.dumps(result | {"ours": round(ours, 2), "reference": round(reference, 2)}))


if __name__ == "__main__":
    main()
