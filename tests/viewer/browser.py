"""A headless Chromium that tests drive through its DevTools protocol; no package beyond aiohttp is needed."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60.0


def chromium() -> str | None:
    """The path of a browser; None if this machine has none (Debian: apt-get install chromium)."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page. `problems` collects what the browser complains of: errors of scripts, and what the policy stopped."""

    def __init__(self, *, width: int = 1300, height: int = 900) -> None:
        self.problems: list[str] = []
        self.requested: list[str] = []
        self._size = (width, height)
        self._number = 0

    async def __aenter__(self) -> Self:
        path = chromium()
        assert path is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-port=0", f"--user-data-dir={self._folder.name}"]
        flags += [f"--window-size={self._size[0]},{self._size[1]}", "--hide-scrollbars", "about:blank"]
        self._process = subprocess.Popen([path, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port_file = Path(self._folder.name, "DevToolsActivePort")
        end = time.monotonic() + SECONDS
        while not (port_file.exists() and port_file.read_text().strip()):
            assert self._process.poll() is None, "the browser ended at once"
            assert time.monotonic() < end, "the browser did not start"
            await asyncio.sleep(0.1)
        port = port_file.read_text().split()[0]
        self._session = aiohttp.ClientSession(trust_env=False)
        async with self._session.get(f"http://127.0.0.1:{port}/json") as answer:
            (page,) = [target for target in await answer.json() if target["type"] == "page"]
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        self._process.kill()
        self._process.wait(30)
        self._folder.cleanup()

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result; what the browser tells meanwhile is noted."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = json.loads(await asyncio.wait_for(self._socket.receive_str(), SECONDS))
            self._note(message)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])

    def _note(self, message: dict[str, Any]) -> None:
        method, told = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(told["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.problems.append(told["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(told["request"]["url"])

    async def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def wait_for(self, condition: str) -> None:
        """Wait until an expression in the page is true."""
        end = time.monotonic() + SECONDS
        while not await self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < end, f"never true: {condition}; {self.problems}"
            await asyncio.sleep(0.05)

    async def open(self, url: str) -> None:
        """Go to an address of the viewer, and wait until its view is drawn."""
        place = "#" + url.partition("#")[2] if "#" in url else "#/curves"
        await self.evaluate("delete document.body.dataset.drawn, 1")
        await self.send("Page.navigate", url=url)
        await self.wait_for(f"document.body && document.body.dataset.drawn === {json.dumps(place)}")

    async def choose(self, element: str, value: str) -> None:
        """Set a control's value, as a user does."""
        script = f"(() => {{ const e = document.getElementById({json.dumps(element)}); e.value = {json.dumps(value)}; "
        await self.evaluate(script + "e.dispatchEvent(new Event('change')); return 1; })()")
        await asyncio.sleep(0.1)
        await self.wait_for("document.body.dataset.drawn === location.hash")

    async def screenshot(self, path: Path) -> None:
        picture = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(picture["data"]))
