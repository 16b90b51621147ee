"""The key that engines ask for: whoever does not send it can neither generate nor read or change weights.

One key a run, made by the process that starts it and handed to its other processes. It stands in their environment, as
SLEUTH_ENGINE_KEY, and never on a command line, which every user of a machine can read.
"""

from __future__ import annotations

import os
import secrets

import requests

from sleuth.loopback import direct_session

VARIABLE = "SLEUTH_ENGINE_KEY"


def engine_key() -> str:
    """The key of this process and its children; made at the first call, unless the environment has one."""
    return os.environ.setdefault(VARIABLE, secrets.token_urlsafe(32))


def use_engine_key(key: str) -> None:
    """Take the key of the process that started this one."""
    os.environ[VARIABLE] = key


def engine_headers() -> dict[str, str]:
    """The header that every request to an engine needs."""
    return {"Authorization": f"Bearer {engine_key()}"}


def engine_session() -> requests.Session:
    """A session for requests to engines: it sends the key, and goes past proxies."""
    session = direct_session()
    session.headers.update(engine_headers())
    return session
