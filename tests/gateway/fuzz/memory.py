"""Connections to a gateway without sockets: the bytes a kernel would carry go straight to and from its HTTP protocol.

All of the request path is real: guard, HTTP parser, handlers, dialects, renderer, sampler. What is missing is the kernel.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from gyre_hpc.gateway.edge import Edge, Guard

LENGTH = b"content-length: "


class Transport(asyncio.Transport):
    """One connection's server end."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self._pipe = pipe
        self._closing = False

    def write(self, data: Any) -> None:
        self._pipe.take(bytes(data))

    def writelines(self, parts: Any) -> None:
        self._pipe.take(b"".join(parts))

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._pipe.ended)

    abort = close

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        return None

    resume_reading = pause_reading

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return 0


class Pipe:
    """One connection's client end."""

    def __init__(self, edge: Edge, runner: web.AppRunner) -> None:
        assert runner.server is not None
        self._guard = Guard(edge, runner.server())  # type: ignore[arg-type]
        self._transport = Transport(self)
        self._received = b""
        self._waiting: asyncio.Future[bytes] | None = None
        self.alive = True
        """Whether another request may be sent."""
        self._over = False
        self._guard.connection_made(self._transport)

    async def ask(self, request: bytes) -> bytes:
        """The whole answer; what there is of it when the connection ends first."""
        self._received = b""
        self._waiting = asyncio.get_running_loop().create_future()
        self._guard.data_received(request)
        return await self._waiting

    def leave(self) -> None:
        """Cut the connection, as a client that gives up."""
        self.alive = False
        self._transport.close()

    def take(self, data: bytes) -> None:
        """What the gateway wrote."""
        self._received += data
        if self._waiting is not None and not self._waiting.done() and whole(self._received):
            self._waiting.set_result(self._received)

    def ended(self) -> None:
        """The connection is gone, whoever ended it."""
        self.alive = False
        if not self._over:
            self._over = True
            self._guard.connection_lost(None)
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(self._received)


def whole(answer: bytes) -> bool:
    """Whether an HTTP answer is all there."""
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = answer[:end].lower()
    at = head.find(LENGTH)
    if at < 0:
        return answer.endswith(b"\r\n0\r\n\r\n")
    length = int(head[at + len(LENGTH) :].split(b"\r\n", 1)[0])
    return len(answer) >= end + 4 + length


def split(answer: bytes) -> tuple[int, bytes, bytes]:
    """(status, head, body) of a whole answer; chunks are joined."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if LENGTH not in head.lower():
        body = _joined(body)
    return int(head[9:12]), head, body


def _joined(chunks: bytes) -> bytes:
    parts: list[bytes] = []
    at = 0
    while True:
        end = chunks.index(b"\r\n", at)
        size = int(chunks[at:end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(chunks[end + 2 : end + 2 + size])
        at = end + size + 4
