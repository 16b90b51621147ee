"""One engine under Ray: `ray.remote(EngineActor).options(...).remote(config)`.

A plain class, so that it can be tested, and made an actor with any resources, by whoever places it. The server dies
with the actor's process, also when Ray kills that.
"""

from __future__ import annotations

from sleuth.engine.devices import check_granted
from sleuth.engine.key import use_engine_key
from sleuth.engine.process_group import group_members
from sleuth.engine.server import EngineConfig, EngineServer
from sleuth.metrics.memory import gpu_memory, process_memory
from sleuth.paths import enter_working_folder


class EngineActor:
    """Owns one `EngineServer`; see there for what the methods do."""

    def __init__(self, config: EngineConfig, key: str) -> None:
        enter_working_folder()
        use_engine_key(key)
        self._server = EngineServer(config)

    def start(self) -> str:
        """Start the server and return its url; ValueError where its GPUs are granted but cannot be used."""
        check_granted(self._server.config.gpu_ids)
        return self._server.start()

    def restart(self) -> str:
        """Stop what is left of the server, start it again, and return its new url."""
        self._server.stop()
        return self.start()

    def look(self) -> tuple[bool, str | None]:
        """Whether the server runs, and what is wrong with it, for a message (None: nothing)."""
        trouble = self._server.trouble()
        return self._server.is_alive(), trouble

    def memory(self, name: str) -> dict[str, float]:
        """The metrics of the memory that all processes of the server, and its GPUs, hold."""
        pid = self._server.pid
        members = [] if pid is None else group_members(pid)
        return process_memory(name, members) | gpu_memory(name, self._server.config.gpu_ids)

    def stop(self) -> None:
        self._server.stop()

    def release_memory(self, tags: tuple[str, ...] | None = None, timeout: float = 120.0) -> None:
        self._server.release_memory(tags, timeout)

    def resume_memory(self, tags: tuple[str, ...] | None = None, timeout: float = 120.0) -> None:
        self._server.resume_memory(tags, timeout)
