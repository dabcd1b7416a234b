"""Rooms: memory for regions on their way in, checked there and handed out as arrays.

The first touch of fresh 4 KiB pages costs several times the copy into them. So anonymous rooms ask for huge pages, and
memory whose arrays nobody refers to any more is kept, up to KEEP_BYTES, for the next region of the same size. Only
memory of a region that came whole is kept: what a broken way may still write to is not seen again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from gyre_hpc.transport.messages import Fragment
from gyre_hpc.transport.region_files import Array, Buffer, Check, arrays_in, total_bytes

KEEP_BYTES: Final = 256 << 20
"""Most spare memory of a process: little beside what its regions take while they are in use."""


class Memory:
    """`size` > 0 bytes, zero at first: anonymous (`file` -1) or an open file without a name, closed with the object."""

    def __init__(self, size: int, *, shared: bool) -> None:
        self.size = size
        self.file = -1
        if shared:
            self.file = os.memfd_create("gyre-region", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self.file)
            os.ftruncate(self.file, size)
            self.map = mmap.mmap(self.file, size)
            return
        self.map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self.map.madvise(mmap.MADV_HUGEPAGE)


class Spares:
    """Memory of one process that is free for the next region. Any thread may give and take."""

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._free: deque[Memory] = deque()
        self._lock = threading.RLock()

    def take(self, size: int, *, shared: bool) -> Memory:
        """Some of this size and kind; what is in it is left over from before."""
        with self._lock:
            for memory in self._free:
                if memory.size == size and (memory.file >= 0) == shared:
                    self._free.remove(memory)
                    return memory
        return Memory(size, shared=shared)

    def give(self, memory: Memory) -> None:
        """Nobody refers to it any more; the oldest go where there is too much."""
        with self._lock:
            self._free.append(memory)
            while sum(spare.size for spare in self._free) > self._keep_bytes:
                self._free.popleft()


class Room:
    """Memory for one region's `bytes` on their way in; private to one attempt to fetch it."""

    def __init__(self, fragments: Sequence[Fragment], spares: Spares | None = None) -> None:
        self.bytes = total_bytes(fragments)
        self._fragments = fragments
        self._spares = spares or Spares(0)
        self._memory: Memory | None = None
        self._check: Check | None = None

    @property
    def buffer(self) -> Buffer:
        """The memory, writable; of exactly `bytes` bytes, with anything in them."""
        return self._taken(shared=False).map if self.bytes else b""

    def file(self) -> int:
        """The same memory as an open file without a name, for another process of this host to write.

        Ask before `buffer`, for a region of at least one byte; the descriptor is the room's.
        """
        memory = self._taken(shared=True)
        if memory.file < 0:
            raise ValueError("the memory of this room is already anonymous")
        return memory.file

    def arrived(self, count: int) -> None:
        """Check the first `count` bytes, which are there, while they are in a cache. Never needed: `arrays` checks all.

        Raises CorruptRecord naming the first fragment that is not as published. For one thread at a time.
        """
        self._check = self._check or Check(self.buffer, self._fragments)
        self._check.arrived(count)

    def arrays(self) -> dict[str, Array]:
        """What the region holds, complete and checked. Raises CorruptRecord."""
        check = self._check or Check(self.buffer, self._fragments)
        check.all()
        memory, self._memory, self._check = self._memory, None, None
        if memory is None:
            return arrays_in(b"", self._fragments)
        root = np.frombuffer(memory.map, np.uint8)
        weakref.finalize(root, self._spares.give, memory).atexit = False
        return arrays_in(root, self._fragments)

    def _taken(self, *, shared: bool) -> Memory:
        if self._memory is None:
            self._memory = self._spares.take(self.bytes, shared=shared)
        return self._memory
