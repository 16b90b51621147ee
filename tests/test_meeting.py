"""The port where the ranks meet is held from the moment it is known."""

from __future__ import annotations

import errno
import multiprocessing
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sleuth.meeting import join_meeting, open_meeting


def other_rank(port: int, results: Any) -> None:
    store = join_meeting("127.0.0.1", port, 2)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)
    value = torch.tensor([2.0])
    dist.all_reduce(value)
    results.put(value.item())


def test_nobody_else_gets_the_port_before_the_ranks_meet_there() -> None:
    store = open_meeting("127.0.0.1", 2)
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use") as taken:
            thief.bind(("127.0.0.1", store.port))
    assert taken.value.errno == errno.EADDRINUSE
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=other_rank, args=(store.port, results))
    process.start()
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)
    try:
        value = torch.tensor([1.0])
        dist.all_reduce(value)
        assert value.item() == results.get(timeout=100) == 3.0
    finally:
        dist.destroy_process_group()
        process.join()


def test_other_addresses_of_the_machine_do_not_reach_it() -> None:
    store = open_meeting("127.0.0.1", 1)
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.2", store.port))
