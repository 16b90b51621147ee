"""The page in a real headless browser: what a user sees and clicks, and that no text of a model runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest

from sleuth.metrics.jsonl import MetricsFile
from sleuth.metrics.trajectories import write_trajectories
from tests.viewer.browser import Browser, chromium
from tests.viewer.made_runs import (
    ARABIC,
    EMOJI,
    SCRIPT,
    made_sample,
    tokenizer,
    write_run,
    write_samples,
    write_trainer_log_probs,
)
from tests.viewer.test_server import Viewer

pytestmark = pytest.mark.skipif(chromium() is None, reason="no browser on this machine: apt-get install chromium")

STEP = "step_0000001.jsonl"
Visit = Callable[[Browser, str], Awaitable[None]]


def visit(visitor: Visit, *runs: Path) -> Browser:
    """Start the viewer of these runs and a browser, and let `visitor(browser, url)` look; nothing may go wrong."""

    async def look() -> Browser:
        async with Browser() as browser:
            await visitor(browser, url)
            assert browser.problems == []
            asked = [address for address in browser.requested if not address.startswith(("data:", "about:"))]
            assert [address for address in asked if not address.startswith(url)] == []
            return browser

    with Viewer(*runs) as (url, _):
        return asyncio.run(look())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "a")
    samples = [
        made_sample(0, "Ann", right=True),
        made_sample(1, SCRIPT, right=False),
        made_sample(2, EMOJI, right=False, valid=False),
        made_sample(3, ARABIC, right=False, searches=0),
    ]
    write_samples(folder, STEP, samples)
    lengths = [len(sample.trace.response_ids) for sample in samples]
    write_trainer_log_probs(folder, STEP.removesuffix(".jsonl"), [[-0.75] * length for length in lengths])
    return folder


def test_curves_of_several_runs_grow_while_a_run_goes_on(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "b", seed=2)
    metrics = other / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 4, "rewa')  # torn by a kill
    with closing(MetricsFile(run / "metrics.jsonl", first_step=100)) as file_of_run:
        file_of_run.write(4, {"own/metric": 1.5, "reward/mean": 0.5})
    (tmp_path / "young" / "logs").mkdir(parents=True)
    (tmp_path / "young" / "config.yaml").write_text("num_rollout: 5\nseed: 3\n")

    async def look(browser: Browser, url: str) -> None:
        await browser.open(url + "/")
        lines = "[...document.querySelectorAll('[data-metric=\"reward/mean\"] polyline')].map(line => line.dataset.run)"
        assert await browser.evaluate(lines) == ["a", "b"]
        text = await browser.evaluate("document.getElementById('main').innerText")
        assert "step 4 of 10" in text
        assert "no step yet" in text
        assert "settings differ" in text
        assert await browser.evaluate("document.querySelector('[data-metric=\"own/metric\"]')") is None
        await browser.choose("metric", "own/metric")
        assert await browser.evaluate("document.querySelectorAll('[data-metric=\"own/metric\"] polyline').length") == 1
        with closing(MetricsFile(run / "metrics.jsonl", first_step=100)) as growing:
            growing.write(5, {"own/metric": 2.5, "reward/mean": 0.6})
        await browser.wait_for("document.getElementById('main').innerText.includes('step 5 of 10')")

    visit(look, run, other, tmp_path / "young")


def test_filters_search_and_links(run: Path) -> None:
    async def look(browser: Browser, url: str) -> None:
        await browser.open(url + "/#/list")
        assert await browser.evaluate("document.getElementById('count').textContent") == "1 to 4 of 4"
        await browser.choose("filter", "wrong")
        assert await browser.evaluate("document.getElementById('count').textContent") == "1 to 3 of 3 (4 logged)"
        await browser.choose("text", "🦊")
        assert await browser.evaluate("document.getElementById('count').textContent") == "1 to 1 of 1 (4 logged)"
        place = await browser.evaluate("document.querySelector('table.list tbody a').href")
        await browser.open(place)
        assert "reward 0" in await browser.evaluate("document.querySelector('h1').textContent")
        assert "no answer tag" in await browser.evaluate("document.getElementById('reward').textContent")
        assert await browser.evaluate("document.querySelector('.query').textContent") == "book 1"
        await browser.open(place.replace("number=2", "number=99"))
        assert "expected a trajectory below 4" in await browser.evaluate("document.getElementById('main').textContent")
        browser.problems.clear()  # the browser reports the 404

    visit(look, run)


def test_tokens_are_coloured_and_the_text_is_the_models_own(run: Path) -> None:
    async def look(browser: Browser, url: str) -> None:
        colours = "[...document.querySelectorAll('.segment.{} .text span')].map(span => span.style.backgroundColor)"
        for number, said in ((1, SCRIPT), (2, EMOJI), (3, ARABIC)):
            await browser.open(f"{url}/#/trajectory?run=a&file={STEP}&number={number}")
            texts = await browser.evaluate(
                "[...document.querySelectorAll('.segment.model .text')].map(t => t.textContent)"
            )
            assert texts[-1] == f"<answer> {said} </answer>"
            stray = "[...document.getElementById('main').childNodes].filter(node => node.nodeType === 3).length"
            assert await browser.evaluate(stray) == 0
        await browser.open(f"{url}/#/trajectory?run=a&file={STEP}&number=1&colour=difference")
        assert set(await browser.evaluate(colours.format("observation"))) == {""}
        assert set(await browser.evaluate(colours.format("model"))) == {
            "rgba(209, 73, 91, 0.5)",
            "rgba(209, 73, 91, 0.706)",
        }
        await browser.evaluate("document.querySelector('input[value=mask]').click()")
        assert set(await browser.evaluate(colours.format("observation"))) == {"rgb(236, 238, 241)"}
        assert len(await browser.evaluate(colours.format("model"))) > 20
        title = await browser.evaluate("document.querySelector('.segment.model .text span').title")
        assert "engine -0.5 nats" in title
        assert "difference -0.25" in title

    visit(look, run)


def test_no_text_of_a_model_runs(run: Path) -> None:
    async def look(browser: Browser, url: str) -> None:
        for place in ("#/list", f"#/trajectory?run=a&file={STEP}&number=1", "#/list?run=a&text=" + quote(SCRIPT[:8])):
            await browser.open(f"{url}/{place}")
            assert await browser.evaluate("document.title") == "Sleuth: runs"
            assert await browser.evaluate("document.querySelectorAll('main script, main img').length") == 0
        injected = "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')"
        await browser.evaluate(injected + ", 1")
        await browser.evaluate("new Promise(done => setTimeout(done, 300))")
        assert await browser.evaluate("document.title") == "Sleuth: runs"
        assert any("Content Security Policy" in problem for problem in browser.problems)
        browser.problems.clear()  # that was the proof that the policy holds

    visit(look, run)


def test_what_changed_between_two_checkpoints(run: Path) -> None:
    write_samples(run, "eval_0000000_demo_greedy.jsonl", [made_sample(i, "Bob", right=False) for i in range(3)])
    write_samples(run, "eval_0000010_demo_greedy.jsonl", [made_sample(i, "Ann", right=i == 1) for i in range(3)])

    async def look(browser: Browser, url: str) -> None:
        await browser.open(f"{url}/#/list?run=a&file=eval_0000010_demo_greedy.jsonl")
        await browser.choose("compare", "eval_0000000_demo_greedy.jsonl")
        assert await browser.evaluate("document.getElementById('count').textContent") == "1 to 1 of 1 (3 logged)"
        assert "wrong" in await browser.evaluate("document.querySelector('table.list tbody').innerText")

    visit(look, run)


def test_ten_thousand_trajectories_and_a_hundred_thousand_tokens(run: Path) -> None:
    sample = made_sample(0, "Ann", right=True)
    write_trajectories(run / "trajectories" / "step_0000002.jsonl", [sample] * 10_000, tokenizer(), 10_000)
    long = made_sample(1, "long", right=False)
    long.trace.append_model([20] * 100_000, [-0.1] * 100_000)
    write_samples(run, "step_0000003.jsonl", [long])

    async def look(browser: Browser, url: str) -> None:
        start = time.monotonic()
        await browser.open(f"{url}/#/list?run=a&file=step_0000002.jsonl")
        print(f"10,000 trajectories: {time.monotonic() - start:.2f} s")
        assert await browser.evaluate("document.getElementById('count').textContent") == "1 to 50 of 10000"
        assert await browser.evaluate("document.querySelectorAll('table.list tbody tr').length") == 50
        await browser.open(f"{url}/#/trajectory?run=a&file=step_0000003.jsonl&number=0")
        spans = "[...document.querySelectorAll('.segment.model')].pop().querySelectorAll('.text span').length"
        assert await browser.evaluate(spans) == 3000
        await browser.evaluate("[...document.querySelectorAll('.segment.model button')].pop().click()")
        assert await browser.evaluate(spans) == 6000

    visit(look, run)
