"""Keeps traffic between the parts of a run off the proxies that the environment names.

HTTP_PROXY and the like are for downloads and trackers; a proxy cannot reach this machine's own addresses.
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
    """Variables (`no_proxy` and the like) that exempt `hosts` and this machine's own names from proxies.

    They extend those of `environment`. Some libraries read the name in lower case, others in upper case, so both get
    what either had. gRPC has a variable of its own, which outranks the others where it is set.
    """
    names = ("no_proxy", "NO_PROXY")
    given = [host.strip() for name in names for host in environment.get(name, "").split(",")]
    changed = dict.fromkeys(names, _joined([*given, *OWN_HOSTS, *hosts]))
    if "no_grpc_proxy" in environment:
        changed["no_grpc_proxy"] = _joined([*environment["no_grpc_proxy"].split(","), *OWN_HOSTS, *hosts])
    return changed


def _joined(hosts: list[str]) -> str:
    """The hosts joined by commas, each once; or "*", which exempts all, but works only if it stands alone."""
    return "*" if "*" in hosts else ",".join(dict.fromkeys(host for host in hosts if host))
