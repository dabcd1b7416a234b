"""Host store of KV pages: one folder of a cell, or of all cells, one file per page, shared by engines and leaders.

A key is (namespace, layout digest, prefix hash): equal keys mean equal bytes, so a page is written once and never
changed. `get` gives a page only if the whole file is as it was written and says itself that it is this key's; what is
torn, damaged or another's is removed and counted, never served. At most `limit_bytes` lie in the folder, whoever
writes: writers take turns (flock) and evict the least recently used first. A leased page is not evicted before its
lease is over: a file's mtime is the time of its last use, or the end of its lease. A page without room is not kept.

Processes of several hosts may share a folder on a parallel file system. Where its flock holds on one host only, pages stay
whole (each appears by rename), but hosts miscount each other: the folder may pass its limit until one that evicts counts anew.
Leases and ages hold as far as the hosts' clocks agree. Partial files of a writer that died go when its own host evicts.

File, little-endian: MAGIC (8 bytes), format u32, length of meta u32, length of payload u64, xxh3-64 of meta + payload
u64; meta = msgpack (namespace str, layout bytes, prefix bytes); payload. Name: sha256 of meta in hex, `.page`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from gyre_hpc.errors import StorageFull

MAGIC: Final = b"GYREKVPG"
FORMAT: Final = 1
HEADER: Final = struct.Struct("<8sIIQQ")
SUFFIX: Final = ".page"
_LOCK: Final = "usage"
"""Holds the bytes in the folder as decimal text; whoever changes them holds its lock."""
_DIGITS: Final = 20
_OF_HOST: Final = "@"
"""Before HOST.PID in the name of a file that is being written."""


class PageKey(msgspec.Struct, frozen=True, array_like=True):
    """Identity of a page. `prefix` is the chain hash over all its tokens and those before it."""

    namespace: str
    layout: bytes
    prefix: bytes


@dataclass
class Counts:
    """What this object has done. `rejected`: files that were torn, damaged or another key's."""

    written: int = 0
    served: int = 0
    rejected: int = 0
    evicted: int = 0
    refused: int = 0


class PageStore:
    """The pages in `folder`, which is made if need be. Any number of processes may share it (of several hosts: see above)."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self.counts = Counts()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, key: PageKey) -> Path:
        """Where the page lies if the store has it."""
        return self.folder / (hashlib.sha256(_meta(key)).hexdigest() + SUFFIX)

    def has(self, key: PageKey) -> bool:
        """Whether there is a file for the key; only `get` says whether it is whole."""
        return self.path(key).exists()

    def get(self, key: PageKey) -> memoryview | None:
        """The page's bytes, checked; None if it is not there, or not as it was written."""
        path = self.path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        payload = page_payload(data, key)
        if payload is None:
            self.counts.rejected += 1
            path.unlink(missing_ok=True)
            return None
        self.counts.served += 1
        self._used_until(path, time.time())
        return payload

    def put(self, pages: Iterable[tuple[PageKey, bytes | memoryview]], *, lease_s: float = 0.0) -> int:
        """Keep these pages, leased for so long; how many of them are there now. Raises StorageFull naming the folder."""
        until = time.time() + lease_s
        kept = 0
        with self._turn() as usage:
            for key, payload in pages:
                path = self.path(key)
                if path.exists():
                    self._used_until(path, until)
                    kept += 1
                elif self._make_room(usage, data := encode_page(key, payload)):
                    self._write(path, data, until)
                    kept += 1
                else:
                    self.counts.refused += 1
        return kept

    def lease(self, keys: Sequence[PageKey], seconds: float) -> int:
        """Let none of these pages be evicted for so long; how many of them there are, up to the first that lacks."""
        until = time.time() + seconds
        for count, key in enumerate(keys):
            if not self._used_until(self.path(key), until):
                return count
        return len(keys)

    def keep_only(self, namespaces: frozenset[str]) -> int:
        """Remove the pages of all other namespaces, leased or not: nobody can ask for them any more. How many."""
        gone = 0
        with self._turn() as usage:
            for path, _, _ in self._files():
                if _namespace(path) not in namespaces:
                    path.unlink(missing_ok=True)
                    gone += 1
            usage.total = sum(size for _, size, _ in self._files())
        return gone

    @property
    def used_bytes(self) -> int:
        """Bytes that lie in the folder."""
        return sum(size for _, size, _ in self._files())

    def _write(self, path: Path, data: bytes, until: float) -> None:
        partial = path.with_name(f".{path.name}{_OF_HOST}{socket.gethostname()}.{os.getpid()}")
        try:
            partial.write_bytes(data)
            os.utime(partial, (until, until))
            partial.rename(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(
                    f"{self.folder}: {error.strerror}", fix="lower engine.kv_store_mib"
                ) from error
            raise
        self.counts.written += 1

    def _make_room(self, usage: _Usage, data: bytes) -> bool:
        """Count `data` in, evicting what was not used for longest; False if leased pages leave no room."""
        if usage.total + len(data) > self.limit_bytes:
            self._evict(usage, len(data))
        if usage.total + len(data) > self.limit_bytes:
            return False
        usage.total += len(data)
        return True

    def _evict(self, usage: _Usage, wanted: int) -> None:
        """Down to an eighth below the limit where unleased pages allow it, so that it is not needed for every page."""
        for torn in self.folder.glob(
            f".*{_OF_HOST}*"
        ):  # of writers that died: it is nobody else's turn on this host
            if torn.stem.rpartition(_OF_HOST)[2] == socket.gethostname():
                torn.unlink(missing_ok=True)
        files, now = sorted(self._files(), key=lambda file: file[2]), time.time()
        usage.total = sum(size for _, size, _ in files)
        aim = min(self.limit_bytes - wanted, self.limit_bytes * 7 // 8)
        for path, size, used in files:
            if usage.total <= aim or used > now:
                return
            path.unlink(missing_ok=True)
            usage.total -= size
            self.counts.evicted += 1

    def _files(self) -> Iterator[tuple[Path, int, float]]:
        """(path, bytes, last use or end of lease) of every page."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX):
                    with contextlib.suppress(FileNotFoundError):
                        stat = entry.stat()
                        yield Path(entry.path), stat.st_size, stat.st_mtime

    @contextlib.contextmanager
    def _turn(self) -> Iterator[_Usage]:
        """One writer at a time, with the bytes in the folder; a writer that dies leaves too many counted, never too few."""
        handle = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            usage = _Usage(handle)
            if not usage.known:
                usage.total = self.used_bytes
            yield usage
        finally:
            os.close(handle)

    @staticmethod
    def _used_until(path: Path, until: float) -> bool:
        """False if the page is not there. A longer lease stands."""
        try:
            until = max(until, path.stat().st_mtime)
            os.utime(path, (until, until))
        except FileNotFoundError:
            return False
        return True


class _Usage:
    """The bytes counted in the folder; a change is in the file before the pages it counts are."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        text = os.pread(handle, _DIGITS, 0)
        self.known = len(text) == _DIGITS and text.isdigit()
        self._total = int(text) if self.known else 0

    @property
    def total(self) -> int:
        return self._total

    @total.setter
    def total(self, total: int) -> None:
        self._total = total
        os.pwrite(self._handle, b"%0*d" % (_DIGITS, total), 0)


def require_locks(folder: Path) -> None:
    """Make `folder` if need be. Raises OSError where it cannot be written or its file system refuses flock."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def encode_page(key: PageKey, payload: bytes | memoryview) -> bytes:
    """The file of a page."""
    meta = _meta(key)
    digest = xxhash.xxh3_64(meta)
    digest.update(payload)
    head = HEADER.pack(MAGIC, FORMAT, len(meta), len(payload), digest.intdigest())
    return b"".join((head, meta, payload))


def page_payload(data: bytes, key: PageKey) -> memoryview | None:
    """The payload of a page's file; None unless it is whole and this key's."""
    if len(data) < HEADER.size:
        return None
    magic, format, meta_bytes, payload_bytes, checksum = HEADER.unpack_from(data)
    if (magic, format) != (MAGIC, FORMAT) or len(data) != HEADER.size + meta_bytes + payload_bytes:
        return None
    body = memoryview(data)[HEADER.size :]
    if xxhash.xxh3_64_intdigest(body) != checksum or body[:meta_bytes] != _meta(key):
        return None
    return body[meta_bytes:]


def _meta(key: PageKey) -> bytes:
    return msgspec.msgpack.encode(key)


def _namespace(path: Path) -> str | None:
    """The namespace a page's file says it is of; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(HEADER.size)
            if len(head) < HEADER.size:
                return None
            meta = file.read(HEADER.unpack(head)[2])
        return msgspec.msgpack.decode(meta, type=PageKey).namespace
    except (OSError, msgspec.DecodeError):
        return None
