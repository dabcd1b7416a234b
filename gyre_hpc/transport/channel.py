"""A second path beside a link's socket, for the time it lasts: every message still arrives exactly once and in order.

Envelopes keep the link's one sequence. Those that go over the channel are kept until the other side's cumulative
acknowledgement; when the channel is closed, for whatever reason, what is left of them is sent again over the socket, which
loses nothing. The receiver puts both paths in order and drops duplicates. A channel that brings nothing for `silent_s`,
or acknowledges nothing for so long, has failed; each side pings every `heartbeat_s`. Nothing here knows MPI, sockets
or clocks; `takes` may be called from any thread, all else from the event loop.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from gyre_hpc.errors import ProtocolViolation

T = TypeVar("T")
WINDOW_FRAMES: Final = 4096
WINDOW_BYTES: Final = 32 << 20
"""A channel with so much unacknowledged takes no more: the socket does."""
MAX_AHEAD: Final = 2 * WINDOW_FRAMES
"""Envelopes that may wait for an earlier one; heartbeats on the socket overtake the channel."""


class ChannelFrame(msgspec.Struct, frozen=True, array_like=True):
    """What crosses a channel: how far the sender has received, and one framed envelope (empty: a ping)."""

    received: int
    envelope: bytes = b""


class InOrder(Generic[T]):
    """Puts numbered items of two paths in order. `received`: all up to this number have been handed out."""

    def __init__(self, received: int = 0) -> None:
        self.received = received
        self._ahead: dict[int, T] = {}

    def take(self, number: int, item: T) -> list[T]:
        """What may be handed out now; nothing for a duplicate. Raises ProtocolViolation if too much is missing."""
        if number > self.received:
            self._ahead.setdefault(number, item)
        if len(self._ahead) > MAX_AHEAD:
            raise ProtocolViolation(
                f"message {self.received + 1} is missing, {len(self._ahead)} later ones wait"
            )
        ready: list[T] = []
        while self.received + 1 in self._ahead:
            self.received += 1
            ready.append(self._ahead.pop(self.received))
        return ready


class Channel:
    """One link's side of its channel. `resend` puts framed envelopes on the socket, `deliver` takes those that came."""

    def __init__(self, resend: Callable[[list[bytes]], None], deliver: Callable[[bytes], None]) -> None:
        self._resend, self._deliver = resend, deliver
        self._lock = threading.Lock()
        self._carry: Callable[[bytes], None] | None = None
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._received: Callable[[], int] = lambda: 0
        self._heard = self._progressed = self._pinged = 0.0
        self.carried = 0
        """Envelopes that this side has ever given to a channel."""

    @property
    def is_open(self) -> bool:
        return self._carry is not None

    def open(self, carry: Callable[[bytes], None], received: Callable[[], int], now: float) -> None:
        """Use `carry` (callable from any thread) from here on; `received` is how far this side has received."""
        self.close()
        self._received = received
        self._heard = self._progressed = now
        self._pinged = float("-inf")
        with self._lock:
            self._carry = carry

    def takes(self, number: int, envelope: bytes) -> bool:
        """Send over the channel if it is open and has room; False: the caller sends over the socket."""
        with self._lock:
            full = len(self._kept) >= WINDOW_FRAMES or self._kept_bytes + len(envelope) > WINDOW_BYTES
            if self._carry is None or full:
                return False
            self._kept.append((number, envelope))
            self._kept_bytes += len(envelope)
            self.carried += 1
            self._carry(msgspec.msgpack.encode(ChannelFrame(self._received(), envelope)))
            return True

    def arrived(self, data: bytes, now: float) -> None:
        """A frame of the other side. Raises msgspec.DecodeError for foreign bytes."""
        frame = msgspec.msgpack.decode(data, type=ChannelFrame)
        self._heard = now
        self._acknowledged(frame.received, now)
        if frame.envelope:
            self._deliver(frame.envelope)

    def _acknowledged(self, received: int, now: float) -> None:
        with self._lock:
            if not self._kept or self._kept[0][0] <= received:
                self._progressed = now
            while self._kept and self._kept[0][0] <= received:
                self._kept_bytes -= len(self._kept.popleft()[1])

    def tick(self, now: float, *, heartbeat_s: float, silent_s: float) -> str:
        """Ping when it is time; returns why the channel has failed, or ""."""
        carry = self._carry
        if carry is None:
            return ""
        if now - self._pinged >= heartbeat_s:
            self._pinged = now
            carry(msgspec.msgpack.encode(ChannelFrame(self._received())))
        if now - self._heard > silent_s:
            return f"silent for {now - self._heard:.1f} s"
        if self._kept and now - self._progressed > silent_s:
            return f"nothing acknowledged for {now - self._progressed:.1f} s"
        return ""

    def close(self) -> int:
        """Go back to the socket, first with what was not acknowledged; returns how many envelopes that were."""
        with self._lock:
            self._carry = None
            again = [envelope for _, envelope in self._kept]
            self._kept.clear()
            self._kept_bytes = 0
        if again:
            self._resend(again)
        return len(again)
