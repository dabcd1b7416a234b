"""A region as one file: its arrays, little-endian and C-ordered, each aligned to 64 bytes, in the manifest's order.

A file is complete before its manifest exists and is never written again, so a reader may map it; it is deleted by
name, which leaves existing maps valid. Files live in memory (/dev/shm) where the host has it, in a folder per run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from gyre_hpc.errors import CorruptRecord, StorageFull
from gyre_hpc.transport.messages import Fragment

Array = npt.NDArray[Any]
Buffer = mmap.mmap | bytearray | memoryview | bytes
ALIGNMENT: Final = 64
HASH_THREADS: Final = 4
"""Most threads that check one region: beyond, memory is the limit."""
HASH_TOGETHER: Final = 4 << 20
"""Bytes below which one thread is faster than to start several."""
MEMORY: Final = Path("/dev/shm")
MARK: Final = ".gyre-run"
"""File in a run's folder that names the run (launch/nodes/leftovers.py); it goes with the last folder beside it."""


def run_folder(run_key: str) -> Path:
    """The folder of this run's regions on this host."""
    return regions_folder() / f"gyre-{run_key}"


def regions_folder() -> Path:
    """Where the folders of all runs lie: in memory where the host has it."""
    return MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def remove_leftovers(run_key: str) -> None:
    """Delete everything of this run on this host; for when none of its processes is left."""
    shutil.rmtree(run_folder(run_key), ignore_errors=True)


def make_owner_folder(run_key: str, owner: str, *, keep: int = 1) -> Path:
    """An empty private folder for this process of `owner`: RUN/OWNER/GENERATION.

    The newest `keep` folders of its dead predecessors stay readable: others may still hold manifests of them.
    """
    own = run_folder(run_key) / owner
    make_private(own.parent, own)
    earlier = _generations(own)
    for generation in earlier[: len(earlier) - keep]:
        shutil.rmtree(own / str(generation), ignore_errors=True)
    folder = own / str(earlier[-1] + 1 if earlier else 0)
    folder.mkdir(mode=0o700)
    return folder


def make_private(*folders: Path) -> None:
    """Make folders for this user alone, the outermost first. Raises StorageFull for one that is another user's.

    Another process of the run that ends may just have removed the outermost, which it found empty.
    """
    for last_try in (False, False, True):
        try:
            for folder in folders:
                folder.mkdir(mode=0o700, exist_ok=True)
                if folder.stat().st_uid != os.getuid():
                    raise StorageFull(
                        f"{folder} belongs to another user",
                        fix="remove it, set cluster.scratch, or use another run folder",
                    )
            return
        except FileNotFoundError:
            if last_try:
                raise


def remove_owner_folder(folder: Path) -> None:
    """Delete a process's folder and those of its predecessors, then whatever folders that leaves empty."""
    for generation in _generations(folder.parent):
        if generation <= int(folder.name):
            shutil.rmtree(folder.parent / str(generation), ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
    remove_bare(folder.parent.parent)


def remove_bare(folder: Path) -> None:
    """Delete a folder in which there is nothing but its mark, unless a process holds it."""
    with contextlib.suppress(OSError), unheld(folder) as free:
        if free and [path.name for path in folder.iterdir()] == [MARK]:
            (folder / MARK).unlink()
        folder.rmdir()


@contextlib.contextmanager
def unheld(folder: Path) -> Iterator[bool]:
    """Whether no process holds the folder (a lock on its mark: `leftovers.hold`); meanwhile none can begin to."""
    try:
        handle = os.open(folder / MARK, os.O_RDWR)
    except OSError:
        handle = None
    try:
        yield handle is None or _locked(handle)
    finally:
        if handle is not None:
            os.close(handle)


def _locked(handle: int) -> bool:
    """A file system without locks knows of nobody who holds one."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def _generations(own: Path) -> list[int]:
    return sorted(int(path.name) for path in own.iterdir()) if own.is_dir() else []


def write(path: Path, arrays: Mapping[str, Array]) -> tuple[Fragment, ...]:
    """Create `path` with these arrays. Raises StorageFull naming the path; no partial file stays."""
    plain = {name: _plain(array) for name, array in arrays.items()}
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            for array in plain.values():
                file.write(_bytes(array))
                file.write(b"\0" * (-array.nbytes % ALIGNMENT))
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"{path}: {error.strerror}", fix="free memory in /dev/shm or set TMPDIR"
            ) from error
        raise
    return tuple(_fragment(name, array) for name, array in plain.items())


def total_bytes(fragments: Sequence[Fragment]) -> int:
    """Size of the file that holds these fragments."""
    return sum(fragment.bytes + -fragment.bytes % ALIGNMENT for fragment in fragments)


def map_file(path: Path, expected: int) -> mmap.mmap | bytes:
    """Map a file copy-on-write. Raises FileNotFoundError, or CorruptRecord if its size is not `expected`."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected:
            raise CorruptRecord(f"{path}: {size} bytes, manifest says {expected}")
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""


class Check:
    """Compares a region's bytes with its manifest's checksums in one pass from the front, as far as they have come."""

    def __init__(self, buffer: Buffer, fragments: Sequence[Fragment]) -> None:
        self._view = memoryview(buffer)
        self._left = list(zip(fragments, _offsets(fragments), strict=True))[::-1]
        self._hash = xxhash.xxh3_64()
        self._hashed = 0

    def arrived(self, count: int) -> None:
        """The first `count` bytes are there. Raises CorruptRecord naming the first fragment that is not as published."""
        while self._left:
            fragment, start = self._left[-1]
            end = start + fragment.bytes
            fresh = self._view[max(self._hashed, start) : min(count, end)]
            if fresh:
                self._hash.update(fresh)
                self._hashed = min(count, end)
            if count < end:
                return
            if self._hash.hexdigest() != fragment.xxh3:
                raise CorruptRecord(f"fragment '{fragment.id}': checksum differs from the manifest")
            self._hash.reset()
            self._left.pop()

    def all(self) -> None:
        """The whole region is there: what is left, by several threads where that is much. Raises as `arrived`."""
        first, rest = self._left[-1:], self._left[:-1][::-1]
        threads = min(HASH_THREADS, len(os.sched_getaffinity(0)), len(self._left))
        if threads < 2 or sum(fragment.bytes for fragment, _ in self._left) < HASH_TOGETHER:
            self.arrived(len(self._view))
            return
        self._left = first
        with ThreadPoolExecutor(threads) as pool:
            checks = [pool.submit(self.arrived, len(self._view))]
            checks += [pool.submit(self._one, fragment, start) for fragment, start in rest]
            for check in checks:
                check.result()

    def _one(self, fragment: Fragment, start: int) -> None:
        Check(self._view[start : start + fragment.bytes], [fragment]).arrived(fragment.bytes)


def arrays_in(buffer: Buffer | npt.NDArray[np.uint8], fragments: Sequence[Fragment]) -> dict[str, Array]:
    """The arrays inside a whole region's bytes, without a copy and unchecked."""
    arrays: dict[str, Array] = {}
    whole = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    for fragment, offset in zip(fragments, _offsets(fragments), strict=True):
        dtype = np.dtype(fragment.dtype)
        count = fragment.bytes // dtype.itemsize
        if count == 0:
            arrays[fragment.id] = np.empty(fragment.shape, dtype)
        else:
            arrays[fragment.id] = whole[offset : offset + fragment.bytes].view(dtype).reshape(fragment.shape)
    return arrays


def verified(buffer: Buffer, fragments: Sequence[Fragment]) -> dict[str, Array]:
    """The arrays inside a whole region's bytes, checked. Raises CorruptRecord naming the fragment."""
    Check(buffer, fragments).all()
    return arrays_in(buffer, fragments)


def _plain(array: Array) -> Array:
    """Little-endian and C-ordered; objects cannot be published."""
    if array.dtype.hasobject:
        raise TypeError(f"an array of {array.dtype} is not plain memory")
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _fragment(name: str, array: Array) -> Fragment:
    digest = xxhash.xxh3_64_hexdigest(_bytes(array))
    return Fragment(id=name, shape=array.shape, dtype=array.dtype.str, bytes=array.nbytes, xxh3=digest)


def _offsets(fragments: Sequence[Fragment]) -> Iterator[int]:
    offset = 0
    for fragment in fragments:
        yield offset
        offset += fragment.bytes + -fragment.bytes % ALIGNMENT
