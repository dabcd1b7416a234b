"""Region backend `nixl`: the puller reads the owner's memory by itself, over RDMA where the network has it.

The owner's file is mapped and registered at its first puller and stays so until it is dropped. Who asks over the owner's
socket, with a proof of the run secret, gets the grant: the card of the owner's agent and the address. The connection is
the lease: the owner unregisters a dropped region only after the last lease, and an owner's death ends the read at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gyre_hpc.transport.backend import Room, WayFailed
from gyre_hpc.transport.hosts import own_address
from gyre_hpc.transport.messages import Manifest
from gyre_hpc.transport.nixl_agent import Agent, Memory
from gyre_hpc.transport.region_streams import asked

log = logging.getLogger(__name__)


class Grant(msgspec.Struct, frozen=True):
    """Owner to puller: where the region lies, and the card of the owner's agent. Empty for a region of no bytes."""

    address: int = 0
    card: bytes = b""


@dataclass
class Offered:
    """One region of this owner: registered at its first grant, forgotten when dropped and free of leases."""

    memory: Memory | None = None
    leases: int = 0
    dropped: bool = False


class NixlBackend:
    """Both sides of one process."""

    name = "nixl"

    def __init__(self, host: str, owner: str, secret: bytes) -> None:
        self._host = host
        self._agent_name = f"{owner}-{os.getpid()}-{secrets.token_hex(4)}"
        self._secret = secret
        self._agent: Agent | None = None
        self._lock = threading.Lock()
        self._offered: dict[Path, Offered] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def start(self) -> None:
        """Load the library and start the agent, which takes about a second."""
        self._agent = await asyncio.to_thread(Agent, self._agent_name, own_address(self._host))

    def close(self) -> None:
        """Unregister everything and end the agent."""
        with self._lock:
            for offered in self._offered.values():
                self._forget(offered)
            self._offered.clear()
            self._agent = None

    # ---- owner --------------------------------------------------------------------------------------------------

    def offer(self, path: Path, total: int) -> str:
        """The address is the name of this process's agent."""
        with self._lock:
            self._offered[path] = Offered()
        return self._agent_name

    def withdraw(self, path: Path) -> None:
        with self._lock:
            offered = self._offered.pop(path, None)
            if offered is not None:
                offered.dropped = True
                if not offered.leases:
                    self._forget(offered)

    @contextlib.contextmanager
    def lease(self, path: Path) -> Iterator[bytes]:
        """Keep the region readable inside the block, under the grant that is handed out."""
        with self._lock:
            offered, agent = self._offered.get(path), self._agent
            if offered is None or agent is None:
                raise WayFailed("the owner has dropped the region")
            grant = self._granted(agent, offered, path)
            offered.leases += 1
        try:
            yield msgspec.msgpack.encode(grant)
        finally:
            with self._lock:
                offered.leases -= 1
                if offered.dropped and not offered.leases:
                    self._forget(offered)

    def progress(self) -> None:
        """To be called all through a lease."""
        if self._agent is not None:
            self._agent.progress()

    def _granted(self, agent: Agent, offered: Offered, path: Path) -> Grant:
        if offered.memory is None:
            with path.open("r+b") as file:
                total = os.fstat(file.fileno()).st_size
                if not total:
                    return Grant()
                offered.memory = agent.register(mmap.mmap(file.fileno(), total))
        return Grant(offered.memory.address, agent.card(offered.memory))

    def _forget(self, offered: Offered) -> None:
        if offered.memory is not None and self._agent is not None:
            try:
                self._agent.forget(offered.memory)
            except WayFailed as error:
                log.warning("%s: %s", self._agent_name, error)
        offered.memory = None

    # ---- puller -------------------------------------------------------------------------------------------------

    async def fetch(self, manifest: Manifest, room: Room, deadline: float) -> None:
        """Read under a lease; reads from one owner take turns, since each ends by forgetting the owner's agent."""
        agent = self._agent
        if agent is None:
            raise WayFailed("this process has no NIXL agent")
        async with (
            self._turns[manifest.ways[self.name]],
            asked(manifest, self._secret, self.name, room.bytes) as (sock, answer),
        ):
            grant = msgspec.msgpack.decode(answer.grant, type=Grant)
            if not room.bytes:
                return
            stop = threading.Event()
            reading = asyncio.ensure_future(asyncio.to_thread(_read, agent, grant, room, deadline, stop))
            gone = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(sock, 1))
            try:
                await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    raise ConnectionError("the owner ended the lease")
                reading.result()
            finally:
                stop.set()
                gone.cancel()
                await asyncio.wait({reading, gone})


def _read(agent: Agent, grant: Grant, room: Room, deadline: float, stop: threading.Event) -> None:
    memory = agent.register(room.buffer)
    try:
        agent.read(grant.card, grant.address, memory, deadline, stop)
    finally:
        agent.forget(memory)
