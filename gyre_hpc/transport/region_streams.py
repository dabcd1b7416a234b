"""Region backend `sockets`: the bytes of a region over TCP, after a proof of the run secret. Every owner has it.

The owner's kernel sends the file, a thread of the puller receives into the room: neither event loop sees the bytes.
Instead of the bytes a puller may ask for another backend's grant on them (what a one-sided read needs to know); its
connection is then the lease: while it is open the owner keeps the region readable, and its end tells of the owner's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import msgspec

from gyre_hpc.errors import ProtocolViolation
from gyre_hpc.transport.backend import Room, WayFailed
from gyre_hpc.transport.hosts import own_address
from gyre_hpc.transport.messages import Manifest
from gyre_hpc.transport.wire import (
    HANDSHAKE_S,
    LENGTH,
    MAX_FRAME,
    NONCE_BYTES,
    connection,
    frame,
    proof,
    read_frame,
)

log = logging.getLogger(__name__)

STREAMS: Final = 32
"""Most pulls that one owner serves at the same time; more wait their turn."""
SILENT_S: Final = 60.0
"""A puller that takes no byte for so long is given up."""
PROGRESS_S: Final = 0.0005
"""Seconds between two calls of `Lessor.progress`."""
LEASE_S: Final = 3600.0
"""A puller that reads for so long by itself is given up; one that dies ends its lease at once."""


PIECE: Final = 1 << 20
"""Most bytes received before they are checked: what a core's cache holds."""
WINDOW: Final = 4 << 20
"""Bytes the kernel may hold for a receiver that is not scheduled."""


class Ask(msgspec.Struct, frozen=True):
    """Puller to owner, after the owner's nonce: the region's file name, by which way, and the proof of the run secret."""

    region: str
    way: str
    proof: bytes


class Answer(msgspec.Struct, frozen=True):
    """Owner to puller: `total` bytes follow (sockets) or may be read under this grant (other ways); or nothing and why."""

    total: int
    grant: bytes = b""
    reason: str = ""


@runtime_checkable
class Lessor(Protocol):
    """The owner's side of a backend whose pullers read by themselves. Called from threads."""

    name: str

    def lease(self, path: Path) -> AbstractContextManager[bytes]:
        """Keep the region in this file readable inside the block; gives what the puller must know. Raises WayFailed."""

    def progress(self) -> None:
        """Called again and again through a lease."""


class SocketBackend:
    """Serves the regions of one owner over TCP, and fetches those of others. Without `secret` nobody is served."""

    name = "sockets"

    def __init__(self, host: str, owner: str, secret: bytes) -> None:
        self._host = own_address(host)
        self._owner = owner
        self._secret = secret
        self._address = ""
        self._offered: dict[str, Path] = {}
        self._server: asyncio.Server | None = None
        self._streams = ThreadPoolExecutor(STREAMS, thread_name_prefix="gyre-region")
        self._sending: set[socket.socket] = set()
        self.lessors: dict[str, Lessor] = {}
        """Other backends of this owner that lease, by name."""

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(connection(self._serve), self._host, 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self._address = f"{host}:{port}"

    def close(self) -> None:
        """Stop listening and cut the streams under way."""
        if self._server is not None:
            self._server.close()
        for sock in self._sending:
            _cut(sock)
        self._streams.shutdown(wait=False)

    def offer(self, path: Path, total: int) -> str:
        """The address is the server's, host:port."""
        self._offered[path.name] = path
        return self._address

    def withdraw(self, path: Path) -> None:
        self._offered.pop(path.name, None)

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
        if data is None:
            return
        ask = msgspec.msgpack.decode(data, type=Ask)
        if not self._secret or not hmac.compare_digest(_ask_proof(self._secret, nonce, ask), ask.proof):
            writer.write(frame(Answer(total=0, reason="the puller does not know the run's secret")))
            return
        path = self._offered.get(ask.region)
        if path is None:
            writer.write(frame(Answer(total=0, reason="the owner has dropped the region")))
            return
        # From here on only the thread writes: the loop's transport has nothing left to send.
        sock = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        self._sending.add(sock)
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._streams, self._deliver, sock, path, ask.way
            )
        finally:
            self._sending.discard(sock)
            sock.close()

    def _deliver(self, sock: socket.socket, path: Path, way: str) -> None:
        """Answer and the file, or a grant on it; the owner may delete its name meanwhile."""
        sock.settimeout(SILENT_S)
        if way == self.name:
            _send(sock, path)
            return
        lessor = self.lessors.get(way)
        try:
            if lessor is None:
                raise WayFailed(f"the owner has no transport {way}")
            total = path.stat().st_size
            with lessor.lease(path) as grant:
                sock.sendall(frame(Answer(total=total, grant=grant)))
                _until_closed(sock, lessor)
        except (WayFailed, FileNotFoundError) as error:
            sock.sendall(frame(Answer(total=0, reason=str(error))))

    async def fetch(self, manifest: Manifest, room: Room, deadline: float) -> None:
        """Stream from `manifest.address`."""
        async with asked(manifest, self._secret, self.name, room.bytes) as (sock, _):
            receiving = asyncio.ensure_future(asyncio.to_thread(_receive, sock, room, deadline))
            try:
                await asyncio.shield(receiving)
            except asyncio.CancelledError:
                _cut(sock)
                await asyncio.wait([receiving])
                raise


@contextlib.asynccontextmanager
async def asked(
    manifest: Manifest, secret: bytes, way: str, total: int
) -> AsyncIterator[tuple[socket.socket, Answer]]:
    """A connection to the owner that has agreed to give these `total` bytes by `way`. Raises WayFailed with its reason."""
    host, _, port = manifest.address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        _widen(sock)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        answer = await _answer(sock, secret, Path(manifest.path).name, way)
        if answer.reason or answer.total != total:
            raise WayFailed(answer.reason or f"{answer.total} bytes offered, manifest says {total}")
        yield sock, answer


async def _answer(sock: socket.socket, secret: bytes, region: str, way: str) -> Answer:
    nonce = await _exactly(sock, NONCE_BYTES)
    ask = Ask(region=region, way=way, proof=b"")
    ask = msgspec.structs.replace(ask, proof=_ask_proof(secret, nonce, ask))
    await asyncio.get_running_loop().sock_sendall(sock, frame(ask))
    (length,) = LENGTH.unpack(await _exactly(sock, LENGTH.size))
    if length > MAX_FRAME:
        raise WayFailed(f"an answer of {length} bytes")
    try:
        return msgspec.msgpack.decode(await _exactly(sock, length), type=Answer)
    except msgspec.DecodeError as error:
        raise WayFailed(f"not a region server: {error}") from error


def _until_closed(sock: socket.socket, lessor: Lessor) -> None:
    """Until the puller closes its connection or is gone; its host may be lost without a word."""
    _keep_alive(sock)
    closed = select.poll()  # not select: it fails for the descriptors of a process that has many
    closed.register(sock, select.POLLIN)
    end = time.monotonic() + LEASE_S
    while not closed.poll(0) and time.monotonic() < end:
        lessor.progress()
        time.sleep(PROGRESS_S)


def _keep_alive(sock: socket.socket) -> None:
    """Have the kernel ask a silent host whether it is there, and end the connection after SILENT_S."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, SILENT_S / 2), (socket.TCP_KEEPINTVL, SILENT_S / 12)):
            sock.setsockopt(socket.IPPROTO_TCP, option, int(value))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)


def _send(sock: socket.socket, path: Path) -> None:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        sock.sendall(frame(Answer(total=0, reason="the owner has dropped the region")))
        return
    with file:
        total = os.fstat(file.fileno()).st_size
        sock.sendall(frame(Answer(total=total)))
        if total:
            sock.sendfile(file)


def _widen(sock: socket.socket) -> None:
    """A large receive buffer, where the host allows one: to ask for less than the kernel would grow to is worse."""
    with contextlib.suppress(OSError, ValueError):
        if int(Path("/proc/sys/net/core/rmem_max").read_text()) >= WINDOW:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW)


def _receive(sock: socket.socket, room: Room, deadline: float) -> None:
    view, offset = memoryview(room.buffer), 0
    while offset < room.bytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{offset} of {room.bytes} bytes came in time")
        sock.settimeout(left)
        count = sock.recv_into(view[offset : offset + PIECE])
        if not count:
            raise ConnectionError(f"stream ended after {offset} of {room.bytes} bytes")
        offset += count
        room.arrived(offset)


async def _exactly(sock: socket.socket, count: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        more = await loop.sock_recv(sock, count - len(data))
        if not more:
            raise ConnectionError("the owner closed the connection")
        data += more
    return data


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _ask_proof(secret: bytes, nonce: bytes, ask: Ask) -> bytes:
    return proof(secret, "region", nonce, b"", ask.region.encode(), ask.way.encode())
