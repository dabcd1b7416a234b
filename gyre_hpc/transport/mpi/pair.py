"""One end of two MPI endpoints that join without a controller: for `gyre bench regions` and the acceptance job.

They join as cells of a run do (port, accept, connect, proofs), and regions take the same path. Whoever makes an `End` starts
its endpoint and carries the invitation from the acceptor to the joiner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gyre_hpc.errors import GyreError
from gyre_hpc.transport.mpi.fetching import Transfers
from gyre_hpc.transport.mpi.host import EndpointHost, socket_path
from gyre_hpc.transport.mpi.wire import (
    Accept,
    Dropped,
    Fetched,
    Join,
    Joined,
    Local,
    Moved,
    PortOpened,
    Ready,
    ToHost,
    Unfit,
)

T = TypeVar("T", bound=Local)
UP_S: Final = 60.0
JOIN_S: Final = 20.0
CHANNEL: Final = 1
PLUGIN: Final = "pmi2"


class NoMpi(GyreError):
    """MPI endpoints do not come up or do not join here (says why)."""


class Invitation(msgspec.Struct, frozen=True):
    """What the joiner must know: who accepts, at which port, for which proof."""

    acceptor: str
    port: str
    nonce: bytes


class End:
    """One host; `fetch` and `ready` are what `MpiBackend` asks of its side."""

    def __init__(self, run: Path, key: str, name: str, stall_s: float = JOIN_S) -> None:
        self.name, self._run, self._stall_s = name, run, stall_s
        self._host = EndpointHost(socket_path(key, name), JOIN_S, self._heard, self._lost)
        self._came: dict[type[Local], asyncio.Future[Local]] = {}
        self._transfers = Transfers()

    @property
    def ready(self) -> bool:
        """Whether MPI runs in the endpoint."""
        return self._host.ready

    @property
    def pid(self) -> int:
        """The endpoint's process id; 0 before there was one."""
        return self._host.pid

    def arguments(self, plugin: str = PLUGIN) -> list[str]:
        """Of `python`, for this end's endpoint."""
        return endpoint_arguments(self._run, self.name, self._host.path, plugin, self._stall_s)

    async def listen(self) -> None:
        """Wait for the endpoint's connection from now on."""
        for kind in (Ready, PortOpened, Joined):
            self._came[kind] = asyncio.get_running_loop().create_future()
        await self._host.start()

    async def up(self) -> None:
        """MPI runs in the endpoint. Raises NoMpi."""
        await self._answer(Ready, "no endpoint came up")

    async def invite(self, joiner: str) -> Invitation:
        """Open a port for one joiner. Raises NoMpi."""
        self._host.send(Accept(CHANNEL, joiner))
        opened = await self._answer(PortOpened, "no port was opened")
        return Invitation(self.name, opened.port, opened.nonce)

    async def join(self, invitation: Invitation) -> None:
        """Join the acceptor. Raises NoMpi."""
        self._host.send(Join(CHANNEL, invitation.acceptor, invitation.port, invitation.nonce))
        await self.joined()

    async def joined(self) -> None:
        """Both sides have proved themselves. Raises NoMpi."""
        await self._answer(Joined, "not joined")

    async def fetch(self, owner: str, path: str, total: int, into: str, moved: Callable[[int], None]) -> None:
        """As `PeerSide.fetch`, from the other end."""
        await self._transfers.fetch(self._host, CHANNEL, path, total, into, moved)

    def close(self) -> None:
        """The endpoint leaves."""
        self._host.close()

    async def _answer(self, kind: type[T], what: str) -> T:
        try:
            found = await asyncio.wait_for(asyncio.shield(self._came[kind]), UP_S)
        except TimeoutError as error:
            raise NoMpi(f"{what} within {UP_S:g} s") from error
        assert isinstance(found, kind)
        return found

    def _heard(self, message: ToHost) -> None:
        if isinstance(message, Moved | Fetched):
            self._transfers.heard(message)
        elif isinstance(message, Unfit | Dropped):
            self._lost(message.reason)
        elif type(message) in self._came and not self._came[type(message)].done():
            self._came[type(message)].set_result(message)

    def _lost(self, reason: str) -> None:
        for came in self._came.values():
            if not came.done():
                came.set_exception(NoMpi(reason))
                came.exception()  # nobody may be waiting
        self._transfers.lost(reason)


def endpoint_arguments(run: Path, name: str, path: Path, plugin: str, stall_s: float = JOIN_S) -> list[str]:
    """Arguments of `python` for the endpoint of the host `name` that listens at `path`."""
    where = ["--run", str(run), "--name", name, "--socket", str(path)]
    limits = ["--plugin", plugin, "--join-s", str(JOIN_S), "--stall-s", str(stall_s)]
    return ["-m", "gyre_hpc.transport.mpi.endpoint", *where, *limits]
