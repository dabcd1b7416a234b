"""Region backend `sockets`: the bytes of a region over TCP, after a proof of the run secret. Every owner has it.

The owner's kernel sends the file, a thread of the puller receives into the room: neither event loop sees the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from gyre_hpc.errors import ProtocolViolation
from gyre_hpc.transport.backend import Room, WayFailed
from gyre_hpc.transport.hosts import own_address
from gyre_hpc.transport.messages import Manifest
from gyre_hpc.transport.wire import HANDSHAKE_S, LENGTH, MAX_FRAME, NONCE_BYTES, frame, proof, read_frame

log = logging.getLogger(__name__)

STREAMS: Final = 32
"""Most pulls that one owner serves at the same time; more wait their turn."""
SILENT_S: Final = 60.0
"""A puller that takes no byte for so long is given up."""


WINDOW: Final = 4 << 20
"""Bytes the kernel may hold for a receiver that is not scheduled."""


class Ask(msgspec.Struct, frozen=True):
    """Puller to owner, after the owner's nonce: the region's file name and the proof of the run secret."""

    region: str
    proof: bytes


class Answer(msgspec.Struct, frozen=True):
    """Owner to puller: `bytes` follow, or nothing and why."""

    bytes: int
    reason: str = ""


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

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._serve, self._host, 0)
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
        except asyncio.CancelledError:  # the process ends; nobody waits for this task
            log.info("%s: pull from %s cut off", self._owner, writer.get_extra_info("peername"))
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.write(nonce)
        async with asyncio.timeout(HANDSHAKE_S):
            data = await read_frame(reader)
        ask = msgspec.msgpack.decode(data or b"", type=Ask)
        if not self._secret or not hmac.compare_digest(ask_proof(self._secret, nonce, ask.region), ask.proof):
            writer.write(frame(Answer(bytes=0, reason="the puller does not know the run's secret")))
            return
        path = self._offered.get(ask.region)
        if path is None:
            writer.write(frame(Answer(bytes=0, reason="the owner has dropped the region")))
            return
        # From here on only the thread writes: the loop's transport has nothing left to send.
        sock = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        self._sending.add(sock)
        try:
            await asyncio.get_running_loop().run_in_executor(self._streams, _send, sock, path)
        finally:
            self._sending.discard(sock)
            sock.close()

    async def fetch(self, manifest: Manifest, room: Room, deadline: float) -> None:
        """Stream from `manifest.address`."""
        loop = asyncio.get_running_loop()
        host, _, port = manifest.address.rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            _widen(sock)
            await loop.sock_connect(sock, (host, int(port)))
            await self._ask(sock, manifest, room.bytes)
            receiving = asyncio.ensure_future(asyncio.to_thread(_receive, sock, room, deadline))
            try:
                await asyncio.shield(receiving)
            except asyncio.CancelledError:
                _cut(sock)
                await asyncio.wait([receiving])
                raise

    async def _ask(self, sock: socket.socket, manifest: Manifest, total: int) -> None:
        loop = asyncio.get_running_loop()
        nonce = await _exactly(sock, NONCE_BYTES)
        region = Path(manifest.path).name
        await loop.sock_sendall(sock, frame(Ask(region=region, proof=ask_proof(self._secret, nonce, region))))
        (length,) = LENGTH.unpack(await _exactly(sock, LENGTH.size))
        if length > MAX_FRAME:
            raise WayFailed(f"an answer of {length} bytes")
        try:
            answer = msgspec.msgpack.decode(await _exactly(sock, length), type=Answer)
        except msgspec.DecodeError as error:
            raise WayFailed(f"not a region server: {error}") from error
        if answer.reason or answer.bytes != total:
            raise WayFailed(answer.reason or f"{answer.bytes} bytes offered, manifest says {total}")


def _send(sock: socket.socket, path: Path) -> None:
    """Answer and the file; the owner may delete its name meanwhile."""
    sock.settimeout(SILENT_S)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        sock.sendall(frame(Answer(bytes=0, reason="the owner has dropped the region")))
        return
    with file:
        total = os.fstat(file.fileno()).st_size
        sock.sendall(frame(Answer(bytes=total)))
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
        count = sock.recv_into(view[offset:])
        if not count:
            raise ConnectionError(f"stream ended after {offset} of {room.bytes} bytes")
        offset += count


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


def ask_proof(secret: bytes, nonce: bytes, region: str) -> bytes:
    """What an Ask must carry."""
    return proof(secret, "region", nonce, b"", region.encode())
