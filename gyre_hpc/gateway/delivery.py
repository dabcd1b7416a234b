"""Hands one finished answer to one client, and keeps the connection alive until there is one.

Nothing is sent before the first keep-alive or the complete answer, whichever comes first; the answer itself leaves in
one piece, or, where a harness needs progress, in parts as they are complete. A call that is lost ends in a TCP reset:
never a clean end, never an error event. `deliver` raises ConnectionError or CancelledError when the client is gone; what
it received stands in `call.delivery`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn

from aiohttp import web

from gyre_hpc.gateway.calls import Call
from gyre_hpc.gateway.dialects.base import AnswerStream, Dialect, Reply
from gyre_hpc.gateway.parts import Contradiction
from gyre_hpc.records import Delivery

log = logging.getLogger(__name__)

_NO_LINGER = struct.pack("ii", 1, 0)


@dataclass
class WholeAnswer:
    """An answer in one JSON body; white space before it is life."""

    dialect: Dialect

    def open(self) -> bytes:
        return b""

    def beat(self) -> bytes:
        return b" "

    def progress(self, reply: Reply) -> bytes:
        return b""

    def finish(self, reply: Reply) -> bytes:
        return self.dialect.answer(reply)


async def deliver(
    request: web.Request,
    call: Call,
    stream: AnswerStream,
    reply: Callable[[], Reply],
    written: Callable[[], Awaitable[None]],
    keepalive_s: float,
    parts: Callable[[], Reply] | None = None,
) -> web.StreamResponse:
    """Wait for the call, keeping the client alive, then send its answer.

    `parts` is given where each part of the answer leaves once it is complete: the call so far, with its complete parts.
    """
    response: web.StreamResponse | None = None
    if parts is not None:
        call.grown.set()
    while True:
        news = b""
        try:
            async with asyncio.timeout(keepalive_s):
                await (call.done if parts is None else call.grown).wait()
                await written()
            if call.done.is_set() or parts is None:
                break
            call.grown.clear()
            if not (news := stream.progress(parts())):
                continue
        except TimeoutError:
            pass
        if response is None:
            response = await _start(request, stream)
            await _write(response, stream.open())
        if news:
            call.delivery = Delivery.PARTIAL
        await _write(response, news or stream.beat())
    if call.answer is None:
        reset(request)
    opening = stream.open() if response is None else b""
    try:
        body = stream.finish(reply())
    except Contradiction as error:
        log.error("call %s: %s", call.id, error)
        call.contradicted = True
        reset(request)
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the client is gone")
    if call.delivery is Delivery.NONE:
        call.delivery = Delivery.PARTIAL
    if response is None:
        response = web.Response(body=opening + body, headers=_headers(stream))
        await response.prepare(request)
    else:
        await response.write(body)
    await response.write_eof()
    call.delivery = Delivery.COMPLETE
    return response


async def _write(response: web.StreamResponse, data: bytes) -> None:
    if data:
        await response.write(data)


async def _start(request: web.Request, stream: AnswerStream) -> web.StreamResponse:
    response = web.StreamResponse(headers=_headers(stream))
    await response.prepare(request)
    return response


def _headers(stream: AnswerStream) -> dict[str, str]:
    kind = "application/json" if isinstance(stream, WholeAnswer) else "text/event-stream; charset=utf-8"
    return {"Content-Type": kind, "Cache-Control": "no-cache"}


def reset(request: web.Request) -> NoReturn:
    """Cut the connection with a TCP reset. Raises ConnectionResetError."""
    transport = request.transport
    if transport is not None:
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        transport.abort()
    raise ConnectionResetError("the call is lost: its connection is reset")
