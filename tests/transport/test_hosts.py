"""The address a server publishes."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from gyre_hpc.errors import ConfigError
from gyre_hpc.transport.hosts import own_address


def test_a_given_address_is_taken_as_it_is() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_auto_is_the_address_of_this_nodes_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert ipaddress.ip_address(own_address("auto")).is_loopback


def test_a_node_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-node.invalid")
    with pytest.raises(ConfigError, match=r"no-such-node\.invalid"):
        own_address("auto")
