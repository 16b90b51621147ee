"""Which network interface gloo uses: that of the address by which other processes of a run reach this node."""

from __future__ import annotations

from collections.abc import Mapping

import psutil

VARIABLE = "GLOO_SOCKET_IFNAME"


def gloo_interface(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that names the interface with this address; {} if it is set already, or no interface has it.

    By itself gloo listens at the address of the host's own name. That is often 127.0.0.1 or 127.0.1.1, which no other
    node reaches; or it is one that all the network reaches, where a run on one node needs only 127.0.0.1.
    """
    if VARIABLE in environment:
        return {}
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return {VARIABLE: name}
    return {}
