"""Which interface gloo is told to use."""

from __future__ import annotations

import socket

import psutil
import pytest

from sleuth.interfaces import VARIABLE, gloo_interface


def test_it_is_the_interface_that_has_the_address() -> None:
    assert gloo_interface("127.0.0.1", {}) == {VARIABLE: "lo"}
    named = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    assert {address: gloo_interface(address, {})[VARIABLE] for address in named} == named


@pytest.mark.parametrize(("address", "environment"), [("127.0.0.1", {VARIABLE: "eth7"}), ("127.9.9.9", {})])
def test_what_is_set_stays_and_an_unknown_address_sets_nothing(address: str, environment: dict[str, str]) -> None:
    assert gloo_interface(address, environment) == {}
