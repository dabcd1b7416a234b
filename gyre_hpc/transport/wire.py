"""Bytes of a link: length-prefixed msgpack frames, the three handshake frames, and the envelope of every message.

Handshake: the server sends Challenge(nonce, epoch); the peer answers Introduction with an HMAC-SHA256 under the run
secret over (nonces, epoch, incarnation, hello); the server answers Welcome, which proves that it knows the secret
too, or Refused. Afterwards every frame is an envelope whose sequence counts from 1 in each direction, or is 0 for
urgent messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import struct
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

import msgspec

from gyre_hpc.errors import ProtocolViolation
from gyre_hpc.transport.channel import InOrder
from gyre_hpc.transport.messages import FromController, FromPeer

T = TypeVar("T")
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

LENGTH: Final = struct.Struct(">I")
MAX_FRAME: Final = 64 << 20
"""Control messages are small; a longer frame is a foreign or broken client."""
NONCE_BYTES: Final = 32
HANDSHAKE_S: Final = 10.0
"""A connection that is not a link by then is dropped."""
URGENT: Final = 0
"""Sequence of what is outside the sequence."""
CLOSE_S: Final = 5.0
"""Longest wait for queued messages to leave when a link is closed."""


class AuthenticationFailed(ProtocolViolation):
    """The other side does not know the run's secret."""


class StaleIncarnation(ProtocolViolation):
    """The peer's incarnation is not newer than one the controller has already met in this epoch."""


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """Server to peer, first frame."""

    nonce: bytes
    epoch: int


class Introduction(msgspec.Struct, frozen=True, tag=True):
    """Peer to server. `hello` is the encoded Hello, covered by `proof`."""

    nonce: bytes
    incarnation: int
    hello: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Server to peer: the link is up."""

    proof: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Server to peer: no link. `kind` names the error to raise."""

    kind: str
    reason: str


class FromPeerEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """Envelope of what a peer sends."""

    epoch: int
    incarnation: int
    sequence: int
    body: FromPeer


class FromControllerEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """Envelope of what the controller sends."""

    epoch: int
    incarnation: int
    sequence: int
    body: FromController


def frame(value: msgspec.Struct) -> bytes:
    """Length prefix and msgpack of one struct."""
    data = msgspec.msgpack.encode(value)
    if len(data) > MAX_FRAME:
        raise ProtocolViolation(
            f"{type(value).__name__} of {len(data)} bytes exceeds the frame limit of {MAX_FRAME}",
            fix="publish bulk as a region and send its manifest",
        )
    return LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame's bytes; None at the end of the stream, also when it ends inside a frame."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > MAX_FRAME:
            raise ProtocolViolation(f"frame of {length} bytes exceeds the limit of {MAX_FRAME}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
        return None


def connection(serve: Serve) -> Serve:
    """`serve` for asyncio's servers. A loop that ends cancels what is still open, and Python 3.11 prints a traceback for each
    such task (https://github.com/python/cpython/issues/113538).
    """

    async def serve_until_cancelled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # nobody waits for this task
            await serve(reader, writer)

    return serve_until_cancelled


def proof(secret: bytes, side: str, server_nonce: bytes, peer_nonce: bytes, *claims: bytes) -> bytes:
    """HMAC that `side` ("server" or "peer") knows the secret in this very handshake, for these claims."""
    parts = (side.encode(), server_nonce, peer_nonce, *claims)
    text = b"".join(LENGTH.pack(len(part)) + part for part in parts)
    return hmac.new(secret, text, hashlib.sha256).digest()


def peer_proof(secret: bytes, challenge: Challenge, nonce: bytes, incarnation: int, hello: bytes) -> bytes:
    """What an Introduction must carry."""
    claims = (str(challenge.epoch).encode(), str(incarnation).encode(), hello)
    return proof(secret, "peer", challenge.nonce, nonce, *claims)


class Fence:
    """Admits each envelope of one direction of one link once, in order; refuses what is stale."""

    def __init__(self, epoch: int, incarnation: int) -> None:
        self._epoch = epoch
        self._incarnation = incarnation
        self.sequence = 0

    def stale(self, epoch: int, incarnation: int) -> bool:
        """True for an envelope of an earlier link. Raises ProtocolViolation for one of a later link."""
        if (epoch, incarnation) > (self._epoch, self._incarnation):
            raise ProtocolViolation(
                f"envelope of (epoch, incarnation) {(epoch, incarnation)} on a link of"
                f" {(self._epoch, self._incarnation)}"
            )
        return (epoch, incarnation) < (self._epoch, self._incarnation)

    def admit(self, epoch: int, incarnation: int, sequence: int) -> bool:
        """True for the next message; False for a stale one. Raises ProtocolViolation for one from the future."""
        if (epoch, incarnation) < (self._epoch, self._incarnation) or sequence <= self.sequence:
            return False
        expected = (self._epoch, self._incarnation, self.sequence + 1)
        if (epoch, incarnation, sequence) != expected:
            raise ProtocolViolation(
                f"envelope (epoch, incarnation, sequence) = {(epoch, incarnation, sequence)}, expected {expected}"
            )
        self.sequence = sequence
        return True


class Arrivals(Generic[T]):
    """The bodies of one direction of one link, each once and in order; several paths may bring them after `widen`."""

    def __init__(self, epoch: int, incarnation: int) -> None:
        self._fence = Fence(epoch, incarnation)
        self._order: InOrder[T] | None = None

    @property
    def received(self) -> int:
        """Sequence of the last body handed out."""
        return self._fence.sequence if self._order is None else self._order.received

    def widen(self) -> None:
        """Later envelopes may overtake earlier ones from here on."""
        if self._order is None:
            self._order = InOrder(self._fence.sequence)

    def take(self, epoch: int, incarnation: int, sequence: int, body: T) -> list[T] | None:
        """What may be handed out now; None for a stale envelope. Raises ProtocolViolation for one from the future."""
        if sequence == URGENT:
            return None if self._fence.stale(epoch, incarnation) else [body]
        if self._order is None:
            return [body] if self._fence.admit(epoch, incarnation, sequence) else None
        if self._fence.stale(epoch, incarnation):
            return None
        return self._order.take(sequence, body)
