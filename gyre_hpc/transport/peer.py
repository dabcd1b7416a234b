"""A peer's side of its link.

Frames are written by one thread, which also sends a heartbeat whenever nothing else went over the socket for
`heartbeat_s`: neither a busy event loop nor tensor work silences the peer. Any thread may `send`. While `channel` is
open (channel.py) messages go over it; hello, heartbeats and the end of the link stay on the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import queue
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Final, Self

import msgspec

from gyre_hpc.errors import PeerLost, ProtocolViolation
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.channel import Channel
from gyre_hpc.transport.messages import FromController, FromPeer, Heartbeat, Hello, Message, Shutdown, Urgent
from gyre_hpc.transport.rendezvous import Rendezvous, read_rendezvous, read_secret
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
    frame,
    peer_proof,
    proof,
    read_frame,
)

log = logging.getLogger(__name__)

POLL_S: Final = 0.1
"""First wait between two looks at the rendezvous file; grows to ten times this, with jitter."""
SEND_TIMEOUT_S: Final = 60.0
"""A peer whose socket takes no byte for so long gives the link up."""
SILENT_HOST_S: Final = 120.0
"""A controller's host that acknowledges no heartbeat for so long is gone: the kernel ends the connection."""


class Link:
    """A peer's end of its link."""

    def __init__(
        self,
        sock: socket.socket,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        epoch: int,
        incarnation: int,
        heartbeat_s: float,
    ) -> None:
        self.epoch = epoch
        self.incarnation = incarnation
        self._reader = reader
        self._writer = writer
        self._arrivals: Arrivals[FromController] = Arrivals(epoch, incarnation)
        self._inbox: asyncio.Queue[FromController | None] = asyncio.Queue()
        self.channel = Channel(lambda frames: self._sender.put(frames), self._take_carried)
        self._sender = _Sender(sock, epoch, incarnation, heartbeat_s, self.channel)
        self._ended = False
        self._told_to_end = False
        self._pump = asyncio.create_task(self._read())

    @property
    def obeys(self) -> bool:
        """Whether a controller is there that has not yet told this peer to end."""
        return not (self._ended or self._told_to_end or self._pump.done())

    @classmethod
    async def connect(
        cls,
        layout: RunLayout,
        hello: Hello,
        incarnation: int,
        *,
        heartbeat_s: float,
        timeout_s: float,
        after_epoch: int = -1,
    ) -> Self:
        """Follow the rendezvous file until a controller with an epoch above `after_epoch` welcomes this peer.

        Raises PeerLost after `timeout_s`, AuthenticationFailed for a wrong secret, StaleIncarnation.
        """
        deadline = time.monotonic() + timeout_s
        wait, last = POLL_S, f"{layout.rendezvous} does not exist"
        while True:
            try:
                rendezvous = read_rendezvous(layout)
                if rendezvous is not None and rendezvous.epoch > after_epoch:
                    async with asyncio.timeout(HANDSHAKE_S):
                        return await cls._introduce(
                            rendezvous, read_secret(layout), hello, incarnation, heartbeat_s
                        )
            except (OSError, TimeoutError, msgspec.DecodeError) as error:
                last = f"{rendezvous}: {error or type(error).__name__}"
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerLost(
                    f"no controller welcomed {hello.kind}-{hello.index} within {timeout_s:g} s ({last})",
                    fix="check that the controller of this run is alive and reachable from this node",
                )
            await asyncio.sleep(min(left, wait * random.uniform(0.5, 1.0)))
            wait = min(wait * 1.5, 10 * POLL_S)

    @classmethod
    async def _introduce(
        cls, rendezvous: Rendezvous, secret: bytes, hello: Hello, incarnation: int, heartbeat_s: float
    ) -> Self:
        reader, writer = await asyncio.open_connection(rendezvous.host, rendezvous.port)
        try:
            epoch = await _prove(reader, writer, secret, hello, incarnation)
            sock: socket.socket = writer.get_extra_info("socket")
            return cls(_duplicate(sock), reader, writer, epoch, incarnation, heartbeat_s)
        except BaseException:
            writer.close()
            raise

    def send(self, message: Message) -> None:
        """Queue a message; messages leave in order, from the sender thread. Callable from any thread."""
        self._sender.put(message)

    async def receive(self) -> FromController | None:
        """The next message; None when the link is closed."""
        message = None if self._ended else await self._inbox.get()
        if message is None:
            self._ended = True
        self._told_to_end = self._told_to_end or isinstance(message, Shutdown)
        return message

    def expect_channel(self) -> None:
        """A channel may be opened, here or at the other side: messages may overtake each other from here on."""
        self._arrivals.widen()

    def open_channel(self, carry: Callable[[bytes], None]) -> None:
        """Send over `carry` from here on, until `channel.close()`; give what it brings to `channel.arrived`."""
        self._arrivals.widen()
        self.channel.open(carry, lambda: self._arrivals.received, time.monotonic())

    async def _read(self) -> None:
        try:
            while (data := await read_frame(self._reader)) is not None:
                self._take(data)
        except (msgspec.DecodeError, ProtocolViolation) as error:
            log.error("link to the controller closed: %s", error)
        finally:
            self._inbox.put_nowait(None)

    def _take_carried(self, framed: bytes) -> None:
        self._arrivals.widen()
        self._take(framed[LENGTH.size :])

    def _take(self, data: bytes) -> None:
        envelope = msgspec.msgpack.decode(data, type=FromControllerEnvelope)
        bodies = self._arrivals.take(envelope.epoch, envelope.incarnation, envelope.sequence, envelope.body)
        if bodies is None:
            log.warning("stale message %s from the controller refused", type(envelope.body).__name__)
        for body in bodies or ():
            self._inbox.put_nowait(body)

    def abandon(self) -> None:
        """End the link at once, for the sender as well: `receive` returns None, what is queued is lost."""
        self._sender.break_off()
        self._writer.transport.abort()

    async def close(self) -> None:
        """Send what is queued and end the link."""
        self._ended = True
        self.channel.close()
        await asyncio.to_thread(self._sender.finish, CLOSE_S)
        self._pump.cancel()
        self._inbox.put_nowait(None)
        self._writer.close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), CLOSE_S)


class _Sender:
    """The one thread that writes a peer's frames; a heartbeat goes out whenever nothing else did."""

    def __init__(
        self, sock: socket.socket, epoch: int, incarnation: int, heartbeat_s: float, channel: Channel
    ) -> None:
        self._socket = sock
        self._epoch = epoch
        self._incarnation = incarnation
        self._heartbeat_s = heartbeat_s
        self._channel = channel
        self._sequence = 0
        self._written = time.monotonic()
        self._queue: queue.SimpleQueue[Message | list[bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gyre-link-sender", daemon=True)
        self._thread.start()

    def put(self, message: Message | list[bytes]) -> None:
        """A message, or framed envelopes that the channel did not bring to the other side."""
        self._queue.put(message)

    def break_off(self) -> None:
        """End the connection for both directions."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def finish(self, timeout_s: float) -> None:
        """Let queued messages leave, then half-close the socket."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (message := self._next()) is not None:
                self._write(message)
        except OSError as error:
            log.info("sender of pid %d ends: %s", os.getpid(), error)
        finally:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
            self._socket.close()

    def _write(self, message: Message | list[bytes]) -> None:
        if isinstance(message, Urgent):
            data = self._frame(URGENT, message)
        elif isinstance(message, Message):
            self._sequence += 1
            data = self._frame(self._sequence, message)
            if not isinstance(message, Heartbeat) and self._channel.takes(self._sequence, data):
                return
        else:
            data = b"".join(message)
        self._socket.sendall(data)
        self._written = time.monotonic()

    def _frame(self, sequence: int, message: Message) -> bytes:
        body: FromPeer = message  # type: ignore[assignment]
        return frame(FromPeerEnvelope(self._epoch, self._incarnation, sequence, body))

    def _next(self) -> Message | list[bytes] | None:
        left = self._written + self._heartbeat_s - time.monotonic()
        try:
            return self._queue.get(timeout=left) if left > 0 else Heartbeat()
        except queue.Empty:
            return Heartbeat()


def _duplicate(sock: socket.socket) -> socket.socket:
    """A second handle on the connection for the sender thread.

    The descriptor stays non-blocking, as the event loop needs it; the time-out makes Python wait for room.
    """
    duplicate = socket.socket(fileno=os.dup(sock.fileno()))
    duplicate.settimeout(SEND_TIMEOUT_S)
    with contextlib.suppress(OSError):
        duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_HOST_S * 1000))
    return duplicate


async def _prove(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, hello: Hello, incarnation: int
) -> int:
    """The peer's half of the handshake; returns the controller's epoch."""
    challenge = msgspec.msgpack.decode(await _handshake_frame(reader), type=Challenge)
    nonce, encoded = secrets.token_bytes(NONCE_BYTES), msgspec.msgpack.encode(hello)
    evidence = peer_proof(secret, challenge, nonce, incarnation, encoded)
    writer.write(frame(Introduction(nonce=nonce, incarnation=incarnation, hello=encoded, proof=evidence)))
    answer = msgspec.msgpack.decode(await _handshake_frame(reader), type=Welcome | Refused)
    if isinstance(answer, Refused):
        error = StaleIncarnation if answer.kind == StaleIncarnation.__name__ else AuthenticationFailed
        raise error(
            f"the controller refused this peer: {answer.reason}", fix="use the run folder of this controller"
        )
    if not hmac.compare_digest(proof(secret, "server", challenge.nonce, nonce), answer.proof):
        raise AuthenticationFailed("the controller does not know the run's secret")
    return challenge.epoch


async def _handshake_frame(reader: asyncio.StreamReader) -> bytes:
    data = await read_frame(reader)
    if data is None:
        raise ConnectionError("the controller closed the connection during the handshake")
    return data
