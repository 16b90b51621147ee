"""The steps around every update of weights: pause the engines, change their weights, flush their caches, continue."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Literal

import requests

from sleuth.engine.key import engine_session

logger = logging.getLogger(__name__)

PauseMode = Literal["abort", "retract", "in_place"]
Body = dict[str, Any] | bytes
Requests = list[Future[str | None]]
"""Under way; the result of each is an error that names the engine, or None."""

FLUSH_POLL_SECONDS = 0.1
AFTERMATH_SECONDS = 30.0
"""Per request after a failure: what an engine then does not answer in this time is left."""


class WeightSyncError(RuntimeError):
    """An update failed; the message says in which state the engines are. `paused`: whether they are still paused."""

    def __init__(self, message: str, *, paused: bool) -> None:
        super().__init__(message)
        self.paused = paused


class EngineGroup:
    """Talks over HTTP to all engines at `urls` at the same time. `timeout`: seconds for one request."""

    def __init__(self, urls: Sequence[str], timeout: float = 600.0) -> None:
        if not urls:
            raise ValueError("expected at least one engine url, found none")
        self.urls = [url.rstrip("/") for url in urls]
        self.timeout = timeout
        self.weights_touched = False
        self._session_open = False
        self._session = engine_session()
        self._pool = ThreadPoolExecutor(len(self.urls), thread_name_prefix="weight-sync")

    def close(self) -> None:
        """Requests that still wait for an answer are left to their time limit."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._session.close()

    def start(self, path: str, bodies: Sequence[Body]) -> Requests:
        """Begin to post `bodies[i]` to engine i."""
        pairs = zip(self.urls, bodies, strict=True)
        return [self._pool.submit(self._post_one, url, path, body) for url, body in pairs]

    def post(self, path: str, body: Body) -> None:
        """Post to all engines at the same time, and wait for them."""
        wait_for(self.start(path, [body] * len(self.urls)))

    def change_weights(self, path: str, body: Body) -> None:
        """As `post`, for requests that change weights: a failure from here on leaves weights partly old, partly new."""
        self.weights_touched = True
        self.post(path, body)

    def open_session(self) -> None:
        """Begin an update of several requests (SGLang: `/begin_weight_update`)."""
        self._session_open = True
        self.post("begin_weight_update", {})

    def close_session(self) -> None:
        """End the update, if one was begun; otherwise the next one could not begin."""
        if self._session_open:
            self.post("end_weight_update", {})
            self._session_open = False

    def flush(self) -> None:
        """Empty the prefix caches, whose keys and values come from the old weights; waits for pending requests."""
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                return self.post("flush_cache", {})
            except WeightSyncError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(FLUSH_POLL_SECONDS)

    def _post_one(self, url: str, path: str, body: Body) -> str | None:
        try:
            if isinstance(body, bytes):
                headers = {"Content-Type": "application/json"}
                response = self._session.post(f"{url}/{path}", data=body, headers=headers, timeout=self.timeout)
            else:
                response = self._session.post(f"{url}/{path}", json=body, timeout=self.timeout)
        except requests.RequestException as error:
            return f"{url}/{path} cannot be reached: {error!r}"
        if response.status_code != 200:
            return f"{url}/{path} answered {response.status_code}: {response.text[:500]}"
        return None


def wait_for(requests: Requests) -> None:
    """Until every engine has answered; a WeightSyncError says which engines failed, and why."""
    raise_errors(request.result() for request in requests)


def raise_errors(errors: Iterable[str | None]) -> None:
    """A WeightSyncError with those that are not None, if any."""
    if found := [error for error in errors if error]:
        raise WeightSyncError("; ".join(found), paused=True)


@contextmanager
def paused_engines(urls: Sequence[str], *, mode: PauseMode = "abort", timeout: float = 600.0) -> Iterator[EngineGroup]:
    """Pause the engines while the block updates their weights; then flush their caches and let them continue.

    `mode` says what happens to requests under way: abort ends them, retract computes them again with the new weights,
    in_place continues them with the old keys and values (the caches cannot be flushed while one is under way).

    If the update fails before it changed a weight, the engines continue with the old weights. If it fails later, they
    stay paused, because nothing sensible can be sampled from them. The WeightSyncError says which is the case.
    """
    group = EngineGroup(urls, timeout)
    try:
        group.post("pause_generation", {"mode": mode})
        yield group
        group.flush()
        group.post("continue_generation", {})
    except Exception as error:
        raise _after_failure(group, error) from error
    finally:
        group.close()


def _after_failure(group: EngineGroup, error: Exception) -> WeightSyncError:
    engines = ", ".join(group.urls)
    group.timeout = min(group.timeout, AFTERMATH_SECONDS)
    with suppress(WeightSyncError):  # what matters is the first error
        group.close_session()
    if group.weights_touched:
        return WeightSyncError(
            f"the weight update failed: {error}. The engines {engines} are left PAUSED with weights partly old and "
            "partly new: restart them, or repeat the update",
            paused=True,
        )
    try:
        group.post("continue_generation", {})
    except WeightSyncError as second:
        return WeightSyncError(
            f"the weight update failed before any weight changed: {error}. Some of the engines {engines} are left "
            f"PAUSED, since they could not be told to continue: {second}",
            paused=True,
        )
    return WeightSyncError(
        f"the weight update failed before any weight changed: {error}. The engines {engines} continue with the old "
        "weights",
        paused=False,
    )
