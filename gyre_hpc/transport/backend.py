"""Region backends: ways to bring a region's bytes from its owner to a puller on another host.

A backend has one object per process, which is owner and puller at once. The owner `offer`s each region it publishes and
puts what it returns into `Manifest.ways` under the backend's name; a puller whose manifest has that name may `fetch`.
A backend moves bytes; whether they are the right ones is checked in the puller's room, against the manifest. One that fails in
any way raises: the caller then takes the next way, so no run depends on it. Contract: tests/transport/test_backends.py.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from gyre_hpc.errors import GyreError
from gyre_hpc.transport.messages import Fragment, Manifest
from gyre_hpc.transport.region_files import Array, Buffer, Check, arrays_in, total_bytes


class WayFailed(GyreError):
    """A backend cannot start, cannot offer a region, or could not fetch one (says why, on whose side)."""


class Room:
    """Memory for one region's `bytes` on their way in; private to one attempt to fetch it."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self.bytes = total_bytes(fragments)
        self._fragments = fragments
        self._check: Check | None = None
        self._map: mmap.mmap | None = None
        self._file = -1

    @property
    def buffer(self) -> Buffer:
        """The memory, writable; of exactly `bytes` bytes."""
        if not self.bytes:
            return b""
        if self._map is None:
            self._map = self._anonymous() if self._file < 0 else mmap.mmap(self._file, self.bytes)
        return self._map

    def arrived(self, count: int) -> None:
        """Check the first `count` bytes, which are there, while they are in a cache. Never needed: `arrays` checks all.

        Raises CorruptRecord naming the first fragment that is not as published. For one thread at a time.
        """
        self._check = self._check or Check(self.buffer, self._fragments)
        self._check.arrived(count)

    def arrays(self) -> dict[str, Array]:
        """What the region holds, complete and checked. Raises CorruptRecord."""
        self.arrived(self.bytes)
        return arrays_in(self.buffer, self._fragments)

    def _anonymous(self) -> mmap.mmap:
        """Of huge pages where the kernel has them: the first touch of 4 KiB pages costs more than their copy."""
        memory = mmap.mmap(-1, self.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def file(self) -> int:
        """The same memory as an open file without a name, for another process of this host to write.

        Ask before `buffer`; the descriptor may be passed over a Unix socket, and is closed with the room.
        """
        if self._file < 0:
            if self._map is not None:
                raise ValueError("the memory of this room is already anonymous")
            self._file = os.memfd_create("gyre-region", os.MFD_CLOEXEC)
            os.ftruncate(self._file, self.bytes)
        return self._file

    def close(self) -> None:
        """Close the descriptor; the memory lives as long as something refers to it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


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
