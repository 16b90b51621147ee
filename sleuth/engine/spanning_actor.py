"""One engine over several nodes under Ray: an actor with a server on each, of which the first is used by all others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray

from sleuth.engine.actor import EngineActor
from sleuth.engine.key import engine_key
from sleuth.engine.server import EngineConfig, free_port

LOOK_SECONDS = 6.0
"""Within them the actor of another node says how its server is."""
STOP_SECONDS = 30.0


class SpanningEngineActor(EngineActor):
    """The actor of the engine's first node. It makes and ends those of the other nodes, which end with it."""

    def __init__(self, config: EngineConfig, key: str, others: Sequence[tuple[dict[str, Any], EngineConfig]]) -> None:
        """`others`: Ray's options and the configuration for each other node."""
        super().__init__(config, key)
        self._others = list(others)
        self._members: list[Any] = []

    def start(self) -> str:
        host = self._server.config.host
        meeting = f"{host}:{free_port(host)}"
        self._server.config = replace(self._server.config, meeting=meeting)
        actor: Any = ray.remote(EngineActor)
        self._members = [
            actor.options(**options).remote(replace(config, meeting=meeting), engine_key())
            for options, config in self._others
        ]
        others = _Starting(self._members, self._server.stop)
        try:
            url = super().start()
        except BaseException:
            if others.error is not None:  # why this one was stopped
                raise others.error from None
            raise
        others.wait()
        return url

    def restart(self) -> str:
        self._end_members()
        return super().restart()

    def look(self) -> tuple[bool, str | None]:
        runs, trouble = super().look()
        troubles = [] if trouble is None else [trouble]
        for rank, member in enumerate(self._members, start=1):
            try:
                its_runs, its_trouble = ray.get(member.look.remote(), timeout=LOOK_SECONDS)
            except ray.exceptions.GetTimeoutError:
                its_runs, its_trouble = True, "its actor does not answer"
            except ray.exceptions.RayError as error:
                its_runs, its_trouble = False, f"its actor ended ({type(error).__name__})"
            runs = runs and its_runs
            troubles += [] if its_trouble is None else [f"its node {rank}: {its_trouble}"]
        return runs, "; ".join(troubles) or None

    def memory(self, name: str) -> dict[str, float]:
        found = super().memory(name)
        for rank, member in enumerate(self._members, start=1):
            found |= ray.get(member.memory.remote(f"{name}_node_{rank}"))
        return found

    def stop(self) -> None:
        stopping = [member.stop.remote() for member in self._members]
        super().stop()
        ray.wait(stopping, num_returns=len(stopping), timeout=STOP_SECONDS)
        self._end_members()

    def _end_members(self) -> None:
        for member in self._members:
            ray.kill(member)
        self._members = []


class _Starting:
    """Servers that start on other nodes. Where one fails, `stop` is called: the first node would wait for it."""

    def __init__(self, members: Sequence[Any], stop: Any) -> None:
        self.error: Exception | None = None
        self._started = [member.start.remote() for member in members]
        self._stop = stop
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        try:
            ray.get(self._started)
        except Exception as error:
            self.error = error
            self._stop()

    def wait(self) -> None:
        """Until all have started; raises what went wrong."""
        self._thread.join()
        if self.error is not None:
            raise self.error
