"""Regions between two endpoints: matched sends in chunks, from the owner's mapped file into the puller's mapped memory.

Both sides only post and test; a chunk is one MPI message. Matched sends are the way because one-sided Get needs the
owner's progress all the same and was measured at a third of their speed between separate steps (MPICH 5, UCX).
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

from gyre_hpc.transport import region_files
from gyre_hpc.transport.mpi.joined import Joined

CHUNK: Final = 8 << 20
"""Large enough for one message to cost little, small enough for the check of the last one to cost little."""
WINDOW: Final = 4
"""Chunks under way at once."""


class Chunks:
    """One transfer at one side. It posts up to `limit`, and is `done` when that is `settled` and all of it has moved."""

    def __init__(self, joined: Joined, transfer: int, memory: mmap.mmap, *, send: bool) -> None:
        self.joined, self.transfer = joined, transfer
        self.total = len(memory)
        self.limit, self.settled = (self.total, True) if send else (0, False)
        self.stopping = False
        self.moved_at = time.monotonic()
        self._view = memoryview(memory)
        self._post = joined.isend_bulk if send else joined.irecv_bulk
        self._posted: deque[tuple[Any, int]] = deque()
        self.offset = 0
        """Bytes posted."""
        self.arrived = 0
        """Bytes moved, from the front."""

    @property
    def done(self) -> bool:
        return self.settled and self.offset >= self.limit and not self._posted

    @property
    def posted(self) -> bool:
        """Whether MPI still uses the memory."""
        return bool(self._posted)

    def settle(self, limit: int) -> None:
        """So many bytes are to be moved: the receiver's side knows it from the owner."""
        self.limit, self.settled, self.moved_at = max(limit, self.offset), True, time.monotonic()

    def stop(self, posted: int = 0) -> int:
        """Post nothing beyond what is posted here, or by the other side; returns how much that is."""
        self.stopping = True
        self.limit = max(self.offset, min(posted, self.limit))
        self.moved_at = time.monotonic()
        return self.limit

    def progress(self, now: float) -> bool:
        """Post and test what can be; True if something moved."""
        moved = False
        while self._posted and self._posted[0][0].Test():
            self.arrived = self._posted.popleft()[1]
            moved = True
        while len(self._posted) < WINDOW and self.offset < self.limit:
            end = min(self.offset + CHUNK, self.total)
            self._posted.append((self._post(self.transfer, self._view[self.offset : end]), end))
            self.offset = end
            moved = True
        if moved:
            self.moved_at = now
        return moved


def open_region(path: str, total: int, run_key: str) -> mmap.mmap:
    """Map a region file of this run on this host for sending. Raises OSError, or CorruptRecord for another size."""
    real = Path(path).resolve()
    if not real.is_relative_to(region_files.run_folder(run_key).resolve()):
        raise PermissionError(f"{path} is not a region of this run")
    mapped = region_files.map_file(real, total)
    assert isinstance(mapped, mmap.mmap)
    return mapped


def open_room(handle: int, total: int) -> mmap.mmap:
    """Map the puller's memory for writing, its pages made at once. Raises OSError."""
    return mmap.mmap(handle, total, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
