"""The place where the ranks of a process group meet: a TCPStore whose port is bound when it is chosen, and kept.

A port that is chosen, closed and bound again when rank 0 has loaded its libraries can be another's by then.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist

TIMEOUT = timedelta(minutes=30)
BACKLOG = 4096
"""Connections that may wait to be accepted: all ranks come at once."""


def open_meeting(address: str, world_size: int, timeout: timedelta = TIMEOUT) -> dist.TCPStore:
    """Rank 0's store, at a free port of `address`, this node's own: other networks of the node do not reach it."""
    with socket.create_server((address, 0), backlog=BACKLOG) as server:
        port = server.getsockname()[1]
        return dist.TCPStore(
            address,
            port,
            world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=os.dup(server.fileno()),
        )


def join_meeting(address: str, port: int, world_size: int) -> dist.TCPStore:
    """Another rank's connection to the store."""
    return dist.TCPStore(address, port, world_size, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
