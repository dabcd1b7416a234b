"""The controller's write-ahead journal: what happened, in order, so that a later controller can go on.

One file per epoch, `journal/<epoch>.journal`: frames of (length u32, crc32 u32, msgpack body). A frame holds entries that
belong together: all of them count, or none. It is appended before the effects of its entries leave the process. A torn
tail (the writer died inside a frame, or its host before the bytes were on disk: zeros) ends the file; a bad frame before
the tail is corruption and raises. Entries survive the death of the process at once and the death of the host after the next
group fsync (`sync`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from gyre_hpc.controller.journal.entries import AnyEntry
from gyre_hpc.errors import CorruptRecord, StorageFull

HEADER = struct.Struct("<II")


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[tuple[AnyEntry, ...]] = msgspec.msgpack.Decoder(tuple[AnyEntry, ...])


class Journal:
    """Appends entries of one epoch. `append` writes before it returns; `sync` makes them survive the host.

    The fsync runs in a thread: a slow filesystem holds up nobody but who waits for `sync`.
    """

    def __init__(self, folder: Path, epoch: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{epoch:04d}.journal"
        self._descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
        self._end = 0
        self._dirty = False
        self._lock = asyncio.Lock()
        self._syncing: asyncio.Task[None] | None = None
        self._failed: StorageFull | None = None
        self.appended: Callable[[AnyEntry], None] = lambda entry: None
        """Called with each entry once it is in the file."""

    @property
    def end(self) -> int:
        """Bytes of whole frames."""
        return self._end

    def append(self, *entries: AnyEntry) -> None:
        """Append one frame. Raises StorageFull; the file then still ends at the last whole frame."""
        body = _encoder.encode(entries)
        frame = HEADER.pack(len(body), zlib.crc32(body)) + body
        try:
            written = os.write(self._descriptor, frame)
            if written != len(frame):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._descriptor, self._end)
            raise self._storage_full(error) from error
        self._end += len(frame)
        self._dirty = True
        for entry in entries:
            self.appended(entry)

    async def sync(self) -> None:
        """Group fsync; what was appended before the call is on disk after it. Raises StorageFull."""
        async with self._lock:
            if not self._dirty:
                return
            self._dirty = False
            try:
                await asyncio.to_thread(_fsync_and_close, os.dup(self._descriptor))
            except OSError as error:
                self._failed = self._storage_full(error)
                raise self._failed from error

    def sync_soon(self) -> None:
        """Start a group fsync unless one is under way. Raises what an earlier one raised: the kernel says it once."""
        if self._failed is not None:
            raise self._failed
        if self._dirty and (self._syncing is None or self._syncing.done()):
            self._syncing = asyncio.create_task(self.sync())

    def close(self) -> None:
        """Make everything survive the host, at once, and end."""
        if self._dirty or self._lock.locked():
            self._dirty = False
            os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _storage_full(self, error: OSError) -> StorageFull:
        return StorageFull(f"{self.path}: {error.strerror}", fix="free space")


def _fsync_and_close(descriptor: int) -> None:
    """Of a duplicate: the journal may be closed meanwhile."""
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_file(path: Path, offset: int = 0) -> Iterator[AnyEntry]:
    """Entries of one file from a frame's start on. Raises CorruptRecord for a bad frame that is not the torn tail."""
    data = path.read_bytes()
    while offset + HEADER.size <= len(data):
        length, crc = HEADER.unpack_from(data, offset)
        if length == 0 and not data[offset:].strip(b"\0"):
            return
        body = data[offset + HEADER.size : offset + HEADER.size + length]
        if len(body) < length:
            return
        if zlib.crc32(body) != crc:
            raise CorruptRecord(
                f"{path}: frame at byte {offset} fails its checksum",
                fix="restore the file from a copy; entries before that byte are good",
            )
        yield from _decoder.decode(body)
        offset += HEADER.size + length


def read_journal(folder: Path, epoch: int = 0, offset: int = 0) -> Iterator[AnyEntry]:
    """Entries of all epochs in order, those before byte `offset` of `epoch` left out."""
    for path in sorted(folder.glob("*.journal")):
        if int(path.stem) >= epoch:
            yield from read_file(path, offset if int(path.stem) == epoch else 0)
