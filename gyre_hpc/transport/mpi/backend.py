"""The region backend `mpi`: this process's endpoint fetches from the owner's, into memory that both map.

A process copies its own regions. The region's address is the owner's name; its bytes are the owner's file, which the owner's endpoint maps when asked.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from gyre_hpc.transport.backend import Room, WayFailed
from gyre_hpc.transport.messages import Manifest
from gyre_hpc.transport.mpi.peer_side import PeerSide


class MpiBackend:
    """Regions over the pairs of `side`, which is somebody else's to start and close."""

    name = "mpi"

    def __init__(self, owner: str, side: PeerSide) -> None:
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
        if manifest.owner == self._owner:
            await asyncio.to_thread(self._copy, manifest.path, room)
            return
        if not self._side.ready:
            raise WayFailed("no MPI endpoint is up here")
        if not room.bytes:
            return
        into = f"/proc/{os.getpid()}/fd/{room.file()}"
        async with asyncio.timeout(deadline - time.monotonic()):
            await self._side.fetch(manifest.ways[self.name], manifest.path, room.bytes, into)

    @staticmethod
    def _copy(path: str, room: Room) -> None:
        """This process's own region: no endpoint joins itself. Raises OSError."""
        with open(path, "rb") as file:
            if file.readinto(room.buffer) != room.bytes:
                raise WayFailed(f"{path} is not whole")
