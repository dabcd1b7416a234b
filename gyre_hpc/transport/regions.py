"""Regions: immutable, versioned, checksummed bulk. The owner publishes, others pull by manifest.

On the owner's host a pull maps the region's file. From elsewhere it takes the first way that works: the run's backend
(`transport.kind`) where owner and puller have it, then TCP, all within one deadline; a way that fails is logged with the
owner and the reason, counted, and left alone for a while. Whatever the way, every fragment is checked against the
manifest before the caller sees any: a pull is complete or raises PullFailed. Pulled arrays are private to the puller
and stay valid after the owner drops or dies. On its host a region also outlives its owner by one restart, so manifests
others hold stay good while the owner recovers.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy.typing as npt

from gyre_hpc.errors import CorruptRecord, GyreError
from gyre_hpc.transport import region_files
from gyre_hpc.transport.backend import Backend, Room, WayFailed
from gyre_hpc.transport.messages import Fragment, Manifest, RegionKind
from gyre_hpc.transport.region_files import remove_leftovers
from gyre_hpc.transport.region_streams import Lessor, SocketBackend
from gyre_hpc.transport.room import Spares

__all__ = [
    "Fragment",
    "Manifest",
    "PullFailed",
    "RegionKind",
    "RegionServer",
    "pull",
    "remove_leftovers",
    "run_key",
]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
SAME_HOST: Final = "same host"
"""The way that maps the owner's file, among the counted ways."""
SHARE: Final = 0.5
"""Part of the time left that a way may take while another can follow."""
AVOID_S: Final = 60.0
"""A way that failed with an owner is not tried with that owner again for so long."""


def run_key(secret: bytes) -> str:
    """Names the run's region folder on every host; tells nothing of the secret."""
    return hashlib.sha256(b"gyre run key" + secret).hexdigest()[:16]


class PullFailed(GyreError):
    """A region could not be had whole; nothing of it was handed out. `reason` says why."""

    def __init__(self, manifest: Manifest, reason: str) -> None:
        where = f"{manifest.kind} '{manifest.name}' version {manifest.version} of {manifest.owner}"
        super().__init__(f"pull of {where} at {manifest.address}: {reason}")
        self.reason = reason


class RegionServer:
    """Publishes the regions of one owner (unique in the run: "cell-1", "processor") and pulls those of others.

    Without `secret` no byte is served over TCP: enough where all processes share a host. `backends` are started and
    closed here; `same_host=False` pulls over the network even what others own on this host, which tests of networks need.
    """

    def __init__(
        self,
        host: str,
        owner: str,
        run_key: str,
        *,
        secret: bytes = b"",
        backends: Sequence[Backend] = (),
        same_host: bool = True,
    ) -> None:
        self._owner = owner
        self._run_key = run_key
        self._sockets = SocketBackend(host, owner, secret)
        self._backends = list(backends)
        self._sockets.lessors = {backend.name: backend for backend in backends if isinstance(backend, Lessor)}
        self._same_host = same_host
        self._spares = Spares()
        self._folder = Path()
        self._serial = itertools.count()
        self.started = False
        self.ways: Counter[str] = Counter()
        """Pulls by the way that brought them ("same host", "sockets", ...), and "NAME failed" for each that did not."""
        self._avoid: dict[tuple[str, str], float] = {}

    async def start(self) -> None:
        """Listen. What the process before this one published stays readable on this host; older regions are freed."""
        self._folder = region_files.make_owner_folder(self._run_key, self._owner)
        await self._sockets.start()
        self.started = True
        for backend in tuple(self._backends):
            try:
                await backend.start()
            except (WayFailed, OSError, TimeoutError) as error:
                self._backends.remove(backend)
                self.ways[f"{backend.name} failed"] += 1
                log.warning("%s goes on without transport %s: %s", self._owner, backend.name, error)

    def publish(
        self, kind: RegionKind, name: str, version: int, layout: str, arrays: Mapping[str, Array]
    ) -> Manifest:
        """Copy `arrays` into a region; callable from any thread. Raises StorageFull."""
        path = self._folder / f"{kind}-{quote(name, safe='')}-v{version}-{next(self._serial)}"
        fragments = region_files.write(path, arrays)
        total = region_files.total_bytes(fragments)
        return Manifest(
            kind=kind,
            name=name,
            version=version,
            layout=layout,
            owner=self._owner,
            address=self._sockets.offer(path, total),
            fragments=fragments,
            path=str(path),
            ways=self._offer(path, total),
        )

    def _offer(self, path: Path, total: int) -> dict[str, str]:
        ways: dict[str, str] = {}
        for backend in self._backends:
            try:
                ways[backend.name] = backend.offer(path, total)
            except (WayFailed, OSError) as error:
                self.ways[f"{backend.name} failed"] += 1
                log.warning(
                    "%s: region %s is not offered by %s: %s", self._owner, path.name, backend.name, error
                )
        return ways

    def drop(self, manifest: Manifest) -> None:
        """Free the region; pulls that have begun still end well. Dropping twice changes nothing."""
        path = self._folder / Path(manifest.path).name
        path.unlink(missing_ok=True)
        for backend in (self._sockets, *self._backends):
            backend.withdraw(path)

    def close(self) -> None:
        """Stop serving and free every region."""
        if not self.started:
            return
        self.started = False
        for backend in (self._sockets, *self._backends):
            backend.close()
        region_files.remove_owner_folder(self._folder)
        if self.ways:
            log.info("pulls by way: %s", ", ".join(f"{way} {n}" for way, n in sorted(self.ways.items())))

    async def pull(
        self, manifest: Manifest, *, deadline_s: float, into: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """All arrays of the region, checked; copied into `into` if given. Raises PullFailed and changes nothing then."""
        end = time.monotonic() + deadline_s
        here = self._same_host or Path(manifest.path).parent == self._folder
        arrays = await self._map(manifest, deadline_s) if here else None
        if arrays is None:
            arrays = await self._fetch(manifest, end, deadline_s)
        return arrays if into is None else _copied(manifest, arrays, into)

    async def _map(self, manifest: Manifest, deadline_s: float) -> dict[str, Array] | None:
        """From the owner's file; None where this host does not have it."""
        try:
            async with asyncio.timeout(deadline_s):
                arrays = await asyncio.to_thread(_mapped, manifest)
        except (FileNotFoundError, PermissionError, IsADirectoryError):
            return None
        except TimeoutError as error:
            raise PullFailed(manifest, f"not complete within {deadline_s:g} s") from error
        except (CorruptRecord, OSError) as error:
            raise PullFailed(manifest, str(error)) from error
        self.ways[SAME_HOST] += 1
        return arrays

    async def _fetch(self, manifest: Manifest, end: float, deadline_s: float) -> dict[str, Array]:
        """By the first way that works; raises PullFailed with the reason of the last."""
        ways = [*self._usable(manifest), self._sockets]
        for backend in ways:
            last = backend is ways[-1]
            left = end - time.monotonic()
            until = end if last else end - (1 - SHARE) * left
            try:
                return await self._attempt(backend, manifest, until)
            except TimeoutError as error:
                failure = PullFailed(manifest, f"not complete within {deadline_s:g} s")
                failure.__cause__ = error
            except (OSError, WayFailed, CorruptRecord) as error:
                failure = PullFailed(manifest, _reason(error))
                failure.__cause__ = error
            self.ways[f"{backend.name} failed"] += 1
            if not last:
                self._avoid[backend.name, manifest.owner] = time.monotonic() + AVOID_S
                log.warning("by %s: %s", backend.name, failure)
        raise failure

    def _usable(self, manifest: Manifest) -> list[Backend]:
        now = time.monotonic()
        return [
            backend
            for backend in self._backends
            if backend.name in manifest.ways and self._avoid.get((backend.name, manifest.owner), 0.0) <= now
        ]

    async def _attempt(self, backend: Backend, manifest: Manifest, until: float) -> dict[str, Array]:
        room = Room(manifest.fragments, self._spares)
        async with asyncio.timeout(until - time.monotonic()):
            await backend.fetch(manifest, room, until)
            arrays = await asyncio.to_thread(room.arrays)
        self.ways[backend.name] += 1
        return arrays


async def pull(
    manifest: Manifest, *, into: Mapping[str, Array] | None = None, deadline_s: float, secret: bytes = b""
) -> dict[str, Array]:
    """The pull of a process that publishes nothing: `RegionServer.pull` without a backend.

    `secret` is the run's; needed only from another host than the owner's.
    """
    puller = RegionServer("127.0.0.1", "puller", "", secret=secret)
    return await puller.pull(manifest, into=into, deadline_s=deadline_s)


def _mapped(manifest: Manifest) -> dict[str, Array]:
    buffer = region_files.map_file(Path(manifest.path), region_files.total_bytes(manifest.fragments))
    return region_files.verified(buffer, manifest.fragments)


def _reason(error: Exception) -> str:
    if isinstance(error, GyreError):
        return error.message
    return f"the owner is gone or broken ({type(error).__name__}: {error})"


def _copied(manifest: Manifest, arrays: dict[str, Array], into: Mapping[str, Array]) -> dict[str, Array]:
    for name, array in arrays.items():
        target = into.get(name)
        if target is None or target.shape != array.shape or target.dtype != array.dtype:
            raise PullFailed(manifest, f"no room for fragment '{name}' of {array.dtype} {array.shape}")
    for name, array in arrays.items():
        into[name][...] = array
    return {name: into[name] for name in arrays}
