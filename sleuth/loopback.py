"""Traffic between the parts of a run stays on its machine, whatever proxy the environment names.

HTTP_PROXY and the like are for downloads and trackers. A proxy cannot reach this machine's own addresses.
"""

from __future__ import annotations

from collections.abc import Mapping

import requests

OWN_HOSTS = ("127.0.0.1", "localhost", "::1")


def direct_session() -> requests.Session:
    """A session for this machine's own servers: it reads neither proxies nor a .netrc from the environment."""
    session = requests.Session()
    session.trust_env = False
    return session


def without_proxy(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """The variables that take `hosts` and this machine's own names out of the proxies of `environment`.

    Libraries read the name in small or in large letters, so both get what either had. gRPC has one of its own,
    which outranks them where it is set.
    """
    names = ("no_proxy", "NO_PROXY")
    given = [host.strip() for name in names for host in environment.get(name, "").split(",")]
    changed = dict.fromkeys(names, _joined([*given, *OWN_HOSTS, *hosts]))
    if "no_grpc_proxy" in environment:
        changed["no_grpc_proxy"] = _joined([*environment["no_grpc_proxy"].split(","), *OWN_HOSTS, *hosts])
    return changed


def _joined(hosts: list[str]) -> str:
    """Each host once; "*", which excepts all, works only where it stands alone."""
    return "*" if "*" in hosts else ",".join(dict.fromkeys(host for host in hosts if host))
