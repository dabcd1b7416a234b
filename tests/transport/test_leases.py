"""The end of a lease: the puller's connection, whatever its descriptor, and a puller's host that is gone without a word."""

from __future__ import annotations

import contextlib
import fcntl
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_hpc.transport.region_streams import SILENT_S, _until_closed

HIGH = 1500
"""Above what select takes."""


class Lessor:
    """Counts calls of `progress`."""

    name = "counted"

    def __init__(self) -> None:
        self.calls = 0
        self.called = threading.Event()

    def lease(self, path: Path) -> contextlib.AbstractContextManager[bytes]:
        return contextlib.nullcontext(b"")

    def progress(self) -> None:
        self.calls += 1
        self.called.set()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Owner's and puller's ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        puller = socket.create_connection(server.getsockname())
        owner, _ = server.accept()
    with owner, puller:
        yield owner, puller


def test_a_lease_ends_with_the_connection_also_in_a_process_of_many_descriptors(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= HIGH:
        pytest.skip(f"at most {hard} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * HIGH), hard))
    owner, puller = pair
    lessor = Lessor()
    with socket.socket(fileno=fcntl.fcntl(owner.fileno(), fcntl.F_DUPFD, HIGH)) as high:
        lease = threading.Thread(target=_until_closed, args=(high, lessor), daemon=True)
        lease.start()
        assert lessor.called.wait(30) and lease.is_alive()
        puller.close()
        lease.join(30)
        assert not lease.is_alive()


def test_a_lease_asks_a_silent_host_whether_it_is_there(pair: tuple[socket.socket, socket.socket]) -> None:
    owner, puller = pair
    puller.close()
    _until_closed(owner, Lessor())
    assert owner.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    idle, each, times = (
        owner.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle + each * times <= SILENT_S
