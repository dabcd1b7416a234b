"""The gateway's edge to its clients: how slow a client may be, how big a request, how many connections.

A `Guard` stands between the transport and aiohttp's handler of each connection. It aborts a connection whose request does
not begin to arrive, or whose head is not whole, within `client_timeout_s` (a connection between two requests may be
silent), and one that takes nothing of what was written for so long; the kernel does the same for what it holds itself
(TCP_USER_TIMEOUT). `read_body` bounds size and time of a body and says so in a Refusal; packed bodies are unpacked there, as
far as the limit and no further. Connections are bounded by the process's file limit: each may need a second file for its
engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import zlib
from dataclasses import dataclass, field
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, HttpProcessingError
from aiohttp.typedefs import Handler, Middleware
from aiohttp.web_protocol import RequestHandler, RequestPayloadError

from gyre_hpc.gateway.dialects.base import Refusal, RefusalKind, invalid

log = logging.getLogger(__name__)

http_log = logging.getLogger(f"{__name__}.http")
"""What aiohttp's handlers say."""
http_log.addFilter(lambda record: not _is_noise(record))
BACKLOG = 1024
FILES_KEPT = 128
"""Files of the process that are no harness's: logs, links, sockets that listen."""
FILES_PER_CONNECTION = 2


def _is_noise(record: logging.LogRecord) -> bool:
    """A client whose HTTP is broken, or that is gone while it is served, may not fill our log with tracebacks."""
    return record.exc_info is not None and isinstance(
        record.exc_info[1], (HttpProcessingError, ConnectionError)
    )


def room_for_connections() -> int:
    """How many clients may be connected at once; raises the process's file limit as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return max(1, (soft - FILES_KEPT) // FILES_PER_CONNECTION)


@dataclass
class Edge:
    """All connections of one gateway."""

    client_timeout_s: float
    room: int = field(default_factory=room_for_connections)
    guards: dict[asyncio.BaseProtocol, Guard] = field(default_factory=dict)
    """By aiohttp's handler of the connection."""

    async def serve(self, runner: web.AppRunner, listening: socket.socket) -> asyncio.Server:
        """Accept connections for the application, until the server that is returned is closed."""
        make = runner.server
        assert make is not None
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: Guard(self, make()), sock=listening, backlog=BACKLOG)

    def begun(self, request: web.BaseRequest) -> None:
        """The head of a request is here and a handler works for it."""
        if (guard := self.guards.get(request.protocol)) is not None:
            guard.begun()

    def over(self, request: web.BaseRequest) -> None:
        """The handler is done."""
        if (guard := self.guards.get(request.protocol)) is not None:
            guard.over()


class Guard(asyncio.Protocol):
    """One connection."""

    def __init__(self, edge: Edge, inner: RequestHandler) -> None:
        self._edge = edge
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._working = False
        self._head: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None

    def connection_made(self, base: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, base)
        if len(self._edge.guards) >= self._edge.room:
            log.error("%d clients are connected: one more is turned away (ulimit -n)", self._edge.room)
            transport.abort()
            return
        self._transport = transport
        self._edge.guards[self._inner] = self
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family != socket.AF_UNIX:
            wait_ms = int(self._edge.client_timeout_s * 1000)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, wait_ms)
        self._head = self._bound("send a request")
        self._inner.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is None:
            return
        self._transport = None
        for timer in (self._head, self._taking):
            if timer is not None:
                timer.cancel()
        del self._edge.guards[self._inner]
        self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._head is None and not self._working:
            self._head = self._bound("send a request")
        self._inner.data_received(data)

    def eof_received(self) -> None:
        self._inner.eof_received()

    def pause_writing(self) -> None:
        self._taking = self._bound("take its answer")
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
        self._inner.resume_writing()

    def begun(self) -> None:
        """A request is whole but for its body."""
        self._working = True
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def over(self) -> None:
        """Its answer has been handed out."""
        self._working = False

    def _bound(self, what: str) -> asyncio.TimerHandle:
        wait_s = self._edge.client_timeout_s
        return asyncio.get_running_loop().call_later(wait_s, self._end, what)

    def _end(self, what: str) -> None:
        if self._transport is not None:
            peer = self._transport.get_extra_info("peername")
            wait_s = self._edge.client_timeout_s
            log.warning("client %s did not %s within %g s: its connection is cut", peer, what, wait_s)
            self._transport.abort()


async def read_body(request: web.Request, limit: int, timeout_s: float) -> bytes:
    """The body of a request, unpacked. Raises Refusal when it is too big, too slow, or not what its head says."""
    try:
        if (request.content_length or 0) > limit:
            raise _too_large(limit)
        async with asyncio.timeout(timeout_s):
            body = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(limit) from error
    except TimeoutError as error:
        text = f"the request body was not here within {timeout_s:g} s"
        raise Refusal(RefusalKind.SLOW, text) from error
    except (RequestPayloadError, BadHttpMessage) as error:
        raise invalid(f"the request body cannot be read: {error}") from error
    return _unpacked(body, request.headers.get("Content-Encoding", "").lower(), limit)


def _unpacked(body: bytes, encoding: str, limit: int) -> bytes:
    """Never makes more than `limit` bytes of what came. Raises Refusal."""
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise invalid(f"Content-Encoding {encoding!r} is not supported: send gzip, deflate or nothing packed")
    stream = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        found = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise invalid(f"the request body is no {encoding}: {error}") from error
    if len(found) > limit:
        raise _too_large(limit)
    if not stream.eof:
        raise invalid(f"the request body is cut: its {encoding} stream does not end")
    return found


def _too_large(limit: int) -> Refusal:
    return Refusal(RefusalKind.TOO_LARGE, f"request body exceeds the maximum size of {limit} bytes")


def watched(edge: Edge) -> Middleware:
    """Tells the guards when requests begin and end."""

    @web.middleware
    async def watch(request: web.Request, handler: Handler) -> web.StreamResponse:
        edge.begun(request)
        try:
            return await handler(request)
        finally:
            edge.over(request)

    return watch
