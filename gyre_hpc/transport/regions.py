"""Regions: immutable, versioned, checksummed bulk. The owner publishes, others pull by manifest (backend: sockets).

On the owner's host a pull maps the region's file; from elsewhere it streams the bytes over TCP after a proof of the
run secret. Either way every fragment is checked against the manifest before the caller sees any: a pull is complete
or raises PullFailed. Pulled arrays are private to the puller and stay valid after the owner drops or dies. On its
host a region also outlives its owner by one restart, so manifests others hold stay good while the owner recovers.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
import numpy.typing as npt

from gyre_hpc.errors import CorruptRecord, GyreError, ProtocolViolation
from gyre_hpc.transport import region_files
from gyre_hpc.transport.hosts import own_address
from gyre_hpc.transport.messages import Fragment, Manifest, RegionKind
from gyre_hpc.transport.region_files import remove_leftovers
from gyre_hpc.transport.wire import HANDSHAKE_S, NONCE_BYTES, frame, proof, read_frame

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
CHUNK: Final = 1 << 20


def run_key(secret: bytes) -> str:
    """Names the run's region folder on every host; tells nothing of the secret."""
    return hashlib.sha256(b"gyre run key" + secret).hexdigest()[:16]


class PullFailed(GyreError):
    """A region could not be had whole; nothing of it was handed out. `reason` says why."""

    def __init__(self, manifest: Manifest, reason: str) -> None:
        where = f"{manifest.kind} '{manifest.name}' version {manifest.version} of {manifest.owner}"
        super().__init__(f"pull of {where} at {manifest.address}: {reason}")
        self.reason = reason


class Ask(msgspec.Struct, frozen=True):
    """Puller to owner, after the owner's nonce: the region's file name and the proof of the run secret."""

    region: str
    proof: bytes


class Answer(msgspec.Struct, frozen=True):
    """Owner to puller: `bytes` follow, or nothing and why."""

    bytes: int
    reason: str = ""


class RegionServer:
    """Publishes the regions of one owner (unique in the run: "cell-1", "processor").

    Without `secret` no byte is served over TCP: enough where all processes share a host.
    """

    def __init__(self, host: str, owner: str, run_key: str, *, secret: bytes = b"") -> None:
        self._host = own_address(host)
        self._owner = owner
        self._run_key = run_key
        self._secret = secret
        self._address = ""
        self._folder = Path()
        self._serial = itertools.count()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. What the process before this one published stays readable on this host; older regions are freed."""
        self._folder = region_files.make_owner_folder(self._run_key, self._owner)
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self._address = f"{host}:{port}"

    def publish(
        self, kind: RegionKind, name: str, version: int, layout: str, arrays: Mapping[str, Array]
    ) -> Manifest:
        """Copy `arrays` into a region; callable from any thread. Raises StorageFull."""
        path = self._folder / f"{kind}-{quote(name, safe='')}-v{version}-{next(self._serial)}"
        fragments = region_files.write(path, arrays)
        return Manifest(
            kind=kind,
            name=name,
            version=version,
            layout=layout,
            owner=self._owner,
            address=self._address,
            fragments=fragments,
            path=str(path),
        )

    def drop(self, manifest: Manifest) -> None:
        """Free the region; pulls that have begun still end well. Dropping twice changes nothing."""
        (self._folder / Path(manifest.path).name).unlink(missing_ok=True)

    def close(self) -> None:
        """Stop serving and free every region."""
        if self._server is not None:
            self._server.close()
            region_files.remove_owner_folder(self._folder)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except (OSError, TimeoutError, msgspec.DecodeError, ProtocolViolation) as error:
            log.warning("%s: pull from %s ended: %s", self._owner, writer.get_extra_info("peername"), error)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.write(nonce)
        async with asyncio.timeout(HANDSHAKE_S):
            data = await read_frame(reader)
        ask = msgspec.msgpack.decode(data or b"", type=Ask)
        if not self._secret or not hmac.compare_digest(
            _ask_proof(self._secret, nonce, ask.region), ask.proof
        ):
            writer.write(frame(Answer(bytes=0, reason="the puller does not know the run's secret")))
            return
        path = self._folder / Path(ask.region).name
        if not path.is_file():
            writer.write(frame(Answer(bytes=0, reason="the owner has dropped the region")))
            return
        view = memoryview(region_files.map_file(path, path.stat().st_size))
        writer.write(frame(Answer(bytes=len(view))))
        for offset in range(0, len(view), CHUNK):
            writer.write(view[offset : offset + CHUNK])
            await writer.drain()


async def pull(
    manifest: Manifest, *, into: Mapping[str, Array] | None = None, deadline_s: float, secret: bytes = b""
) -> dict[str, Array]:
    """All arrays of the region, checked; copied into `into` if given. Raises PullFailed and changes nothing then.

    `secret` is the run's; needed only from another host than the owner's.
    """
    try:
        async with asyncio.timeout(deadline_s):
            arrays = await _arrays(manifest, secret)
    except TimeoutError as error:
        raise PullFailed(manifest, f"not complete within {deadline_s:g} s") from error
    except CorruptRecord as error:
        raise PullFailed(manifest, error.message) from error
    except (OSError, ProtocolViolation, msgspec.DecodeError, asyncio.IncompleteReadError) as error:
        raise PullFailed(
            manifest, f"the owner is gone or broken ({type(error).__name__}: {error})"
        ) from error
    return arrays if into is None else _copied(manifest, arrays, into)


async def _arrays(manifest: Manifest, secret: bytes) -> dict[str, Array]:
    total = region_files.total_bytes(manifest.fragments)
    try:
        buffer: Any = await asyncio.to_thread(region_files.map_file, Path(manifest.path), total)
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        buffer = await _stream(manifest, secret, total)
    return await asyncio.to_thread(region_files.verified, buffer, manifest.fragments)


async def _stream(manifest: Manifest, secret: bytes, total: int) -> bytearray:
    """The region's bytes over TCP."""
    host, _, port = manifest.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=CHUNK)
    try:
        nonce = await reader.readexactly(NONCE_BYTES)
        region = Path(manifest.path).name
        writer.write(frame(Ask(region=region, proof=_ask_proof(secret, nonce, region))))
        answer = msgspec.msgpack.decode(await read_frame(reader) or b"", type=Answer)
        if answer.reason or answer.bytes != total:
            raise PullFailed(
                manifest, answer.reason or f"{answer.bytes} bytes offered, manifest says {total}"
            )
        return await _fill(reader, total)
    finally:
        writer.close()


async def _fill(reader: asyncio.StreamReader, total: int) -> bytearray:
    buffer = bytearray(total)
    offset = 0
    while offset < total:
        data = await reader.read(min(CHUNK, total - offset))
        if not data:
            raise ConnectionError(f"stream ended after {offset} of {total} bytes")
        buffer[offset : offset + len(data)] = data
        offset += len(data)
    return buffer


def _copied(manifest: Manifest, arrays: dict[str, Array], into: Mapping[str, Array]) -> dict[str, Array]:
    for name, array in arrays.items():
        target = into.get(name)
        if target is None or target.shape != array.shape or target.dtype != array.dtype:
            raise PullFailed(manifest, f"no room for fragment '{name}' of {array.dtype} {array.shape}")
    for name, array in arrays.items():
        into[name][...] = array
    return {name: into[name] for name in arrays}


def _ask_proof(secret: bytes, nonce: bytes, region: str) -> bytes:
    return proof(secret, "region", nonce, b"", region.encode())
