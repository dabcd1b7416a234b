"""Region backends: ways to bring a region's bytes from its owner to a puller on another host.

A backend has one object per process, which is owner and puller at once. The owner `offer`s each region it publishes and
puts what it returns into `Manifest.ways` under the backend's name; a puller whose manifest has that name may `fetch`.
A backend moves bytes; whether they are the right ones is checked in the puller's room, against the manifest. One that fails in
any way raises: the caller then takes the next way, so no run depends on it. Contract: tests/transport/test_backends.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from gyre_hpc.errors import GyreError
from gyre_hpc.transport.messages import Manifest
from gyre_hpc.transport.room import Room

__all__ = ["Backend", "Room", "WayFailed"]


class WayFailed(GyreError):
    """A backend cannot start, cannot offer a region, or could not fetch one (says why, on whose side)."""


class Backend(Protocol):
    """One way between hosts. Every method but `offer` and `withdraw` is called on the event loop."""

    name: str
    """Its key in `Manifest.ways` and in `transport.kind`."""

    async def start(self) -> None:
        """Get ready. Raises WayFailed if it cannot run here; the process then goes on without it."""

    def close(self) -> None:
        """Let go of everything, also of fetches of others that are under way."""

    def offer(self, path: Path, total: int) -> str:
        """Make the region in this complete file of `total` bytes fetchable and return its address, a short text.

        Callable from any thread. Raises WayFailed.
        """

    def withdraw(self, path: Path) -> None:
        """The region is dropped: fetches that have begun end well, later ones are refused. Callable from any thread.

        Withdrawing twice, or what was never offered, changes nothing.
        """

    async def fetch(self, manifest: Manifest, room: Room, deadline: float) -> None:
        """Fill the room with the region's bytes before `deadline` (`time.monotonic`).

        May be cancelled at any await; nothing of it may run afterwards. Raises WayFailed, OSError, TimeoutError, or what
        `Room.arrived` raises.
        """
