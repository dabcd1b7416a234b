"""The region backend `mpi`: this process's endpoint fetches from the owner's, into memory that both map.

The region's address is the owner's name; its bytes are the owner's file, which the owner's endpoint maps when asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

from gyre_hpc.transport.backend import Room, WayFailed
from gyre_hpc.transport.messages import Manifest


class Side(Protocol):
    """What a backend needs of its process's MPI side (`PeerSide`)."""

    @property
    def ready(self) -> bool:
        """Whether an endpoint with MPI is up here."""

    async def fetch(self, owner: str, path: str, total: int, into: str, moved: Callable[[int], None]) -> None:
        """Fill the file `into` with the region file `path` of `owner`; `moved` is told how much is there. Raises OSError."""


@contextlib.asynccontextmanager
async def checking(room: Room) -> AsyncIterator[Callable[[int], None]]:
    """Check the room in a thread, while its bytes come, as far as the function given out has been told.

    Raises CorruptRecord at the end of the block. No thread of it is left then, however the block ends.
    """
    there, more, over = 0, asyncio.Event(), False

    def moved(count: int) -> None:
        nonlocal there
        there = count
        more.set()

    async def check() -> None:
        while await more.wait() and not over:
            more.clear()
            await asyncio.to_thread(room.arrived, there)

    task = asyncio.create_task(check())
    try:
        yield moved
    finally:
        over = True
        more.set()
        await asyncio.wait([task])
        wrong = task.exception()
    if wrong is not None:
        raise wrong


class MpiBackend:
    """Regions over the pairs of `side`, which is somebody else's to start and close."""

    name = "mpi"

    def __init__(self, owner: str, side: Side) -> None:
        self._owner, self._side = owner, side

    async def start(self) -> None:
        """Nothing to get ready: the endpoint comes when it comes."""

    def close(self) -> None:
        """Nothing of its own."""

    def offer(self, path: Path, total: int) -> str:
        return self._owner

    def withdraw(self, path: Path) -> None:
        """The owner deletes the file; transfers that have begun have mapped it."""

    async def fetch(self, manifest: Manifest, room: Room, deadline: float) -> None:
        if not self._side.ready:
            raise WayFailed("no MPI endpoint is up here")
        if not room.bytes:
            return
        into = f"/proc/{os.getpid()}/fd/{room.file()}"
        async with asyncio.timeout(deadline - time.monotonic()):
            async with checking(room) as moved:
                await self._side.fetch(manifest.ways[self.name], manifest.path, room.bytes, into, moved)
