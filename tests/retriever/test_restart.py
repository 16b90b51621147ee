"""A retrieval server that is killed in the middle of a rollout, and started again."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from local_search_server import local_search
from sleuth.search import SearchService, drain_search_metrics

ROOT = Path(__file__).resolve().parents[2]
COUNT = 40


def start(folder: Path, port: int) -> tuple[subprocess.Popen[bytes], str]:
    corpus, url_file = folder / "corpus.jsonl", folder / "url"
    url_file.unlink(missing_ok=True)
    corpus.write_text("".join(json.dumps({"contents": f'"T{n}"\nunique{n}'}) + "\n" for n in range(COUNT)))
    command = ["local_dense_retriever/retrieval_server.py", "--corpus_path", str(corpus), "--url_file", str(url_file)]
    process = subprocess.Popen([sys.executable, *command, "--port", str(port)], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not url_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"the server did not start; it ended with {process.wait()}")
        time.sleep(0.05)
    return process, url_file.read_text().strip()


def test_a_rollout_waits_for_a_server_that_is_killed_and_started_again(tmp_path: Path) -> None:
    process, url = start(tmp_path, 0)
    drain_search_metrics()

    async def search(query: str) -> list[dict]:
        return await local_search(f"{url}/retrieve", query, 1, timeout=30, retries=30)

    async def rollout() -> list[str]:
        nonlocal process
        service = SearchService(search, concurrency=4, max_failure_rate=0.0)

        async def trajectory(number: int) -> str:
            (passage,) = await service.search(f"unique{number}")
            return passage.title

        first = [asyncio.create_task(trajectory(number)) for number in range(COUNT // 2)]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        process.kill()
        process.wait()
        rest = [asyncio.create_task(trajectory(number)) for number in range(COUNT // 2, COUNT)]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in rest)  # they wait
        process, _ = await asyncio.to_thread(start, tmp_path, int(url.rsplit(":", 1)[1]))
        return await asyncio.gather(*first, *rest)

    try:
        assert asyncio.run(rollout()) == [f"T{number}" for number in range(COUNT)]
    finally:
        process.terminate()
        process.wait()
    metrics = drain_search_metrics()
    assert metrics["search/requests"] == COUNT
    assert metrics["search/success_rate"] == pytest.approx(1.0)
