"""The controller's side of links: accept, authenticate, supersede, read.

A newer incarnation of the same (kind, index) ends the older link at once; one that is not newer is refused, so an
incarnation number serves one connection per epoch. Messages of a superseded link that were not yet received are
still delivered to its reader, followed by None: fencing what they ask for is the reader's part.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable

import msgspec

from gyre_hpc.errors import ConfigError, ProtocolViolation
from gyre_hpc.transport.channel import Channel
from gyre_hpc.transport.hosts import own_address
from gyre_hpc.transport.messages import FromPeer, Heartbeat, Hello, Message, PeerKind, Urgent
from gyre_hpc.transport.wire import (
    CLOSE_S,
    HANDSHAKE_S,
    LENGTH,
    NONCE_BYTES,
    URGENT,
    Arrivals,
    AuthenticationFailed,
    Challenge,
    FromControllerEnvelope,
    FromPeerEnvelope,
    Introduction,
    Refused,
    StaleIncarnation,
    Welcome,
    connection,
    frame,
    peer_proof,
    proof,
    read_frame,
)

log = logging.getLogger(__name__)


class PeerLink:
    """The controller's end of one peer's link. `incarnation` and `hello` are what the peer proved."""

    def __init__(
        self,
        hello: Hello,
        epoch: int,
        incarnation: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.hello = hello
        self.epoch = epoch
        self.incarnation = incarnation
        self._reader = reader
        self._writer = writer
        self._sequence = 0
        self._arrivals: Arrivals[FromPeer] = Arrivals(epoch, incarnation)
        self.channel = Channel(self._write_again, self._take_carried)
        self._inbox: asyncio.Queue[FromPeer | None] = asyncio.Queue()
        self._heard = time.monotonic()
        self._closed = False
        self._pump = asyncio.create_task(self._read())

    @property
    def name(self) -> str:
        return f"{self.hello.kind}-{self.hello.index} (incarnation {self.incarnation}, {self.hello.host})"

    def send(self, message: Message) -> None:
        """Queue a message; messages leave in order. On a closed link nothing happens: `receive` tells."""
        if self._closed or self._writer.is_closing():
            return
        urgent = isinstance(message, Urgent)
        self._sequence += not urgent
        sequence = URGENT if urgent else self._sequence
        envelope = FromControllerEnvelope(self.epoch, self.incarnation, sequence, message)  # type: ignore[arg-type]
        data = frame(envelope)
        if urgent or not self.channel.takes(self._sequence, data):
            self._writer.write(data)

    def expect_channel(self) -> None:
        """A channel may be opened, here or at the other side: messages may overtake each other from here on."""
        self._arrivals.widen()

    def open_channel(self, carry: Callable[[bytes], None]) -> None:
        """Send over `carry` from here on, until `channel.close()`; give what it brings to `channel.arrived`."""
        self._arrivals.widen()
        self.channel.open(carry, lambda: self._arrivals.received, time.monotonic())

    async def receive(self) -> FromPeer | None:
        """The next message that is not a heartbeat; None when the link is closed and its inbox is empty."""
        message = await self._inbox.get()
        if message is None:
            self._inbox.put_nowait(None)
        return message

    def silent_s(self) -> float:
        """Seconds since the last frame of any kind arrived."""
        return time.monotonic() - self._heard

    async def close(self) -> None:
        """Send what is queued and end the link."""
        self.channel.close()
        self._closed = True
        self._writer.close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), CLOSE_S)
        await self._pump

    def abandon(self) -> None:
        """End the link at once; what is queued is lost."""
        self._closed = True
        self._writer.transport.abort()

    async def _read(self) -> None:
        try:
            while (data := await read_frame(self._reader)) is not None:
                self._heard = time.monotonic()
                self._take(msgspec.msgpack.decode(data, type=FromPeerEnvelope))
        except (msgspec.DecodeError, ProtocolViolation) as error:
            log.error("link to %s closed: %s", self.name, error)
        finally:
            self._writer.close()
            self._inbox.put_nowait(None)

    def _write_again(self, frames: list[bytes]) -> None:
        if not self._closed and not self._writer.is_closing():
            self._writer.writelines(frames)

    def _take_carried(self, framed: bytes) -> None:
        self._arrivals.widen()
        self._take(msgspec.msgpack.decode(framed[LENGTH.size :], type=FromPeerEnvelope))

    def _take(self, envelope: FromPeerEnvelope) -> None:
        bodies = self._arrivals.take(envelope.epoch, envelope.incarnation, envelope.sequence, envelope.body)
        if bodies is None:
            log.warning("stale message %s from %s refused", type(envelope.body).__name__, self.name)
        for body in bodies or ():
            if not self._closed and not isinstance(body, Heartbeat):
                self._inbox.put_nowait(body)


class LinkServer:
    """Listens for peers of one epoch; `accept` yields authenticated links."""

    def __init__(self, secret: bytes, epoch: int, host: str) -> None:
        self._secret = secret
        self._epoch = epoch
        self._host = own_address(host)
        self._server: asyncio.Server | None = None
        self._accepted: asyncio.Queue[PeerLink] = asyncio.Queue()
        self._newest: dict[tuple[PeerKind, int], int] = {}
        self._links: dict[tuple[PeerKind, int], PeerLink] = {}

    async def start(self) -> tuple[str, int]:
        """Listen on a free port; returns (host, port) for the rendezvous file. Raises ConfigError naming the host."""
        try:
            self._server = await asyncio.start_server(connection(self._greet), self._host, 0)
        except OSError as error:
            raise ConfigError(
                f"cluster.host={self._host}: the controller cannot listen there ({os.strerror(error.errno or 0)})",
                fix="set cluster.host to an address of this node, or to auto",
            ) from error
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    async def accept(self) -> PeerLink:
        """The next authenticated peer."""
        return await self._accepted.get()

    async def close(self) -> None:
        """Stop listening and close every link."""
        if self._server is not None:
            self._server.close()
        for link in self._links.values():
            await link.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                link = await self._handshake(reader, writer)
        except (TimeoutError, ConnectionError, msgspec.DecodeError, ProtocolViolation) as error:
            log.warning("peer %s refused: %s", writer.get_extra_info("peername"), error)
            writer.close()
            return
        await self._adopt(link)

    async def _handshake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> PeerLink:
        challenge = Challenge(nonce=secrets.token_bytes(NONCE_BYTES), epoch=self._epoch)
        writer.write(frame(challenge))
        data = await read_frame(reader)
        if data is None:
            raise ConnectionError("the peer left during the handshake")
        introduction = msgspec.msgpack.decode(data, type=Introduction)
        try:
            hello = self._verify(challenge, introduction)
        except ProtocolViolation as error:
            writer.write(frame(Refused(kind=type(error).__name__, reason=error.message)))
            raise
        writer.write(frame(Welcome(proof=proof(self._secret, "server", challenge.nonce, introduction.nonce))))
        return PeerLink(hello, self._epoch, introduction.incarnation, reader, writer)

    def _verify(self, challenge: Challenge, introduction: Introduction) -> Hello:
        """The proved hello; claims the incarnation. Raises AuthenticationFailed or StaleIncarnation."""
        incarnation = introduction.incarnation
        expected = peer_proof(self._secret, challenge, introduction.nonce, incarnation, introduction.hello)
        if not hmac.compare_digest(expected, introduction.proof):
            raise AuthenticationFailed("the peer does not know the run's secret")
        hello = msgspec.msgpack.decode(introduction.hello, type=Hello)
        newest = self._newest.get((hello.kind, hello.index), -1)
        if incarnation <= newest:
            raise StaleIncarnation(f"{hello.kind}-{hello.index}: incarnation {incarnation} after {newest}")
        self._newest[hello.kind, hello.index] = incarnation
        return hello

    async def _adopt(self, link: PeerLink) -> None:
        key = (link.hello.kind, link.hello.index)
        older = self._links.pop(key, None)
        self._links[key] = link
        if older is not None:
            log.info("%s supersedes incarnation %d", link.name, older.incarnation)
            older.abandon()
        self._accepted.put_nowait(link)
