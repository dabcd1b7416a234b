"""Regions between two endpoints: matched sends in chunks, from the owner's mapped file into the puller's mapped memory.

Both sides only post and test; a chunk is one MPI message. Matched sends are the way because one-sided Get needs the
owner's progress all the same and was measured at a third of their speed between separate steps (MPICH 5, UCX).
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from pathlib import Path
from typing import Any, Final

from gyre_hpc.transport import region_files
from gyre_hpc.transport.mpi.joined import Joined

CHUNK: Final = 16 << 20
WINDOW: Final = 4
"""Chunks under way at once."""


class Chunks:
    """The chunks of one transfer at one side. `done` is set by `progress`."""

    def __init__(self, joined: Joined, transfer: int, memory: mmap.mmap, *, send: bool) -> None:
        self.joined, self.transfer = joined, transfer
        self._memory = memory
        self._view = memoryview(memory)
        self._post = joined.isend_bulk if send else joined.irecv_bulk
        self._posted: deque[Any] = deque()
        self._offset = 0

    @property
    def done(self) -> bool:
        return self._offset >= len(self._view) and not self._posted

    def progress(self) -> bool:
        """Post and test what can be; True if something moved."""
        moved = False
        while self._posted and self._posted[0].Test():
            self._posted.popleft()
            moved = True
        while len(self._posted) < WINDOW and self._offset < len(self._view):
            end = min(self._offset + CHUNK, len(self._view))
            self._posted.append(self._post(self.transfer, self._view[self._offset : end]))
            self._offset = end
            moved = True
        return moved


def open_region(path: str, total: int, run_key: str) -> mmap.mmap:
    """Map a region file of this run on this host for sending. Raises OSError, or CorruptRecord for another size."""
    real = Path(path).resolve()
    if not real.is_relative_to(region_files.run_folder(run_key).resolve()):
        raise PermissionError(f"{path} is not a region of this run")
    mapped = region_files.map_file(real, total)
    assert isinstance(mapped, mmap.mmap)
    return mapped


def open_room(into: str, total: int) -> mmap.mmap:
    """Map the puller's memory for writing, its pages made at once. Raises OSError."""
    handle = os.open(into, os.O_RDWR)
    try:
        return mmap.mmap(handle, total, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(handle)
