"""The loop of an endpoint: its host's wishes, frames of its channels, chunks of its transfers, one thread.

It waits on the host's socket with a time limit and looks at MPI in between. The limit grows from nothing (a transfer moves)
over MOVING_WAIT_S (it waits for the other side, which may need this CPU) and HOT_WAIT_S (a frame came a moment ago) to
IDLE_WAIT_S: an idle endpoint looks 200 times a second.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Final, NoReturn, ParamSpec

import msgspec

from gyre_hpc.errors import CorruptRecord, ProtocolViolation
from gyre_hpc.transport.mpi import joined as joins
from gyre_hpc.transport.mpi.host_socket import HostSocket
from gyre_hpc.transport.mpi.joined import Joined
from gyre_hpc.transport.mpi.library import MPI
from gyre_hpc.transport.mpi.maps import Maps
from gyre_hpc.transport.mpi.transfers import Chunks, open_region, open_room
from gyre_hpc.transport.mpi.wire import (
    Accept,
    Alive,
    AnyAcross,
    Ask,
    Bye,
    Carried,
    Carry,
    Drop,
    Dropped,
    Fetch,
    Fetched,
    Join,
    Leave,
    PortOpened,
    Reply,
    ToEndpoint,
)
from gyre_hpc.transport.mpi.wire import Joined as JoinedNow
from gyre_hpc.transport.regions import run_key
from gyre_hpc.transport.wire import NONCE_BYTES

log = logging.getLogger("gyre_hpc.transport.mpi.endpoint")
P = ParamSpec("P")
MOVING_WAIT_S: Final = 0.00005
HOT_S: Final = 0.02
HOT_WAIT_S: Final = 0.0002
IDLE_WAIT_S: Final = 0.005
ALIVE_S: Final = 1.0
EXIT_STUCK: Final = 70
LEAVE_S: Final = 0.2


class Service:
    """One endpoint's channels and transfers."""

    def __init__(self, host: HostSocket, name: str, secret: bytes, join_s: float, stall_s: float) -> None:
        self._host, self._name, self._secret = host, name, secret
        self._join_s, self._stall_s = join_s, stall_s
        self._run_key = run_key(secret)
        self._channels: dict[int, Joined] = {}
        self._asked: dict[int, tuple[mmap.mmap, float]] = {}
        self._incoming: dict[int, Chunks] = {}
        self._outgoing: list[Chunks] = []
        self._moved = self._active = time.monotonic()
        self._told = 0.0
        self._maps = Maps()
        self._moving = False

    def run(self) -> None:
        """Until Leave; raises PeerLost when the host is gone."""
        while True:
            for message in self._host.receive(self._wait()):
                if isinstance(message, Leave):
                    self._leave()
                    return
                self._obey(message)
            for channel in list(self._channels.values()):
                self._guarded(channel, self._hear, channel)
            self._transfer()
            self._tell_alive()

    def _wait(self) -> float:
        if self._incoming or self._outgoing:
            return 0.0 if self._moving else MOVING_WAIT_S
        return HOT_WAIT_S if self._asked or time.monotonic() - self._active < HOT_S else IDLE_WAIT_S

    def _tell_alive(self) -> None:
        now = time.monotonic()
        if now - self._told >= ALIVE_S:
            self._told = now
            self._maps.tidy()
            self._host.send(Alive())

    def _guarded(self, channel: Joined, work: Callable[P, None], *args: P.args, **named: P.kwargs) -> None:
        """Whatever is wrong with a channel ends that channel alone."""
        try:
            work(*args, **named)
        except (MPI.Exception, ProtocolViolation, msgspec.DecodeError) as error:
            self._drop(channel.channel, " ".join(str(error).split()))

    def _drop(self, number: int, reason: str) -> None:
        """Forget the channel: its communicator is abandoned, because freeing it may wait for a dead process."""
        if self._channels.pop(number, None) is None:
            return
        log.warning("channel %d ended: %s", number, reason)
        self._host.send(Dropped(number, reason))
        if any(chunks.joined.channel == number for chunks in (*self._incoming.values(), *self._outgoing)):
            self._abandon("a channel ended while a region was under way")

    # ---- the host's wishes --------------------------------------------------------------------------------------

    def _obey(self, message: ToEndpoint) -> None:
        match message:
            case Accept(channel=number, joiner=joiner):
                self._join(number, lambda: self._accept(number, joiner))
            case Join():
                self._join(message.channel, lambda: self._connect(message))
            case Carry(channel=number, data=data) if number in self._channels:
                self._active = time.monotonic()
                self._send(self._channels[number], Carried(data))
            case Drop(channel=number):
                self._channels.pop(number, None)
            case Fetch(channel=number, transfer=transfer) if number in self._channels:
                self._send(self._channels[number], Ask(transfer, message.path, message.bytes))
                self._asked[transfer] = (self._room(message), time.monotonic())
            case Fetch(transfer=transfer):
                self._host.send(Fetched(transfer, "the channel has ended"))
            case _:
                pass

    def _send(self, channel: Joined, frame: AnyAcross) -> None:
        self._guarded(channel, channel.send, frame)

    def _accept(self, number: int, joiner: str) -> Joined:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return joins.accept(
            number,
            self._name,
            joiner,
            nonce,
            self._secret,
            lambda port: self._host.send(PortOpened(number, port, nonce)),
        )

    def _connect(self, message: Join) -> Joined:
        return joins.connect(
            message.channel, self._name, message.acceptor, message.port, message.nonce, self._secret
        )

    def _join(self, number: int, work: Callable[[], Joined]) -> None:
        """Under the watchdog: a join that does not return takes the process with it."""
        began = time.monotonic()
        watchdog = threading.Timer(
            self._join_s, self._abandon, [f"channel {number}: no join in {self._join_s:g} s"]
        )
        watchdog.daemon = True
        watchdog.start()
        try:
            self._channels[number] = work()
        except (MPI.Exception, ProtocolViolation, msgspec.DecodeError) as error:
            log.warning("channel %d: %s", number, error)
            self._host.send(Dropped(number, " ".join(str(error).split())))
        else:
            self._host.send(JoinedNow(number, time.monotonic() - began))
        finally:
            watchdog.cancel()
        self._active = time.monotonic()

    def _leave(self) -> None:
        """Say bye where someone may listen; a moment for it to leave."""
        for channel in list(self._channels.values()):
            self._send(channel, Bye())
        end = time.monotonic() + LEAVE_S
        while time.monotonic() < end:
            for channel in list(self._channels.values()):
                self._guarded(channel, self._hear, channel)
            time.sleep(HOT_WAIT_S)

    @staticmethod
    def _abandon(reason: str) -> NoReturn:
        log.error("%s; this endpoint ends", reason)
        logging.shutdown()
        os._exit(EXIT_STUCK)

    # ---- the other endpoints ------------------------------------------------------------------------------------

    def _hear(self, channel: Joined) -> None:
        for frame in channel.receive():
            self._active = time.monotonic()
            match frame:
                case Carried(data=data):
                    self._host.send(Carry(channel.channel, data))
                case Ask():
                    self._serve(channel, frame)
                case Reply(transfer=transfer, reason=reason):
                    self._answered(channel, transfer, reason)
                case Bye():
                    self._drop(channel.channel, "the other side has left")
                    return
                case _:
                    raise ProtocolViolation(f"{type(frame).__name__} on a joined channel")

    def _serve(self, channel: Joined, ask: Ask) -> None:
        try:
            memory = self._maps.of(
                ask.path, ask.bytes, lambda: open_region(ask.path, ask.bytes, self._run_key)
            )
        except (OSError, CorruptRecord) as error:
            channel.send(Reply(ask.transfer, f"the owner has no such region ({error})"))
            return
        channel.send(Reply(ask.transfer))
        self._begin()
        self._outgoing.append(Chunks(channel, ask.transfer, memory, send=True))

    def _room(self, fetch: Fetch) -> mmap.mmap:
        """The puller's memory, made while the owner looks for the region."""
        try:
            return self._maps.of(fetch.into, fetch.bytes, lambda: open_room(fetch.into, fetch.bytes))
        except OSError as error:
            self._host.send(Fetched(fetch.transfer, f"cannot write the memory of the host ({error})"))
            self._abandon("a region is on its way to nowhere")

    def _answered(self, channel: Joined, transfer: int, reason: str) -> None:
        asked = self._asked.pop(transfer, None)
        if asked is None:
            raise ProtocolViolation(f"an answer to transfer {transfer}, which nobody asked for")
        if reason:
            self._host.send(Fetched(transfer, reason))
            return
        self._begin()
        self._incoming[transfer] = Chunks(channel, transfer, asked[0], send=False)

    def _begin(self) -> None:
        if not self._incoming and not self._outgoing:
            self._moved = time.monotonic()

    def _transfer(self) -> None:
        now = time.monotonic()
        if any(now - since > self._stall_s for _, since in self._asked.values()):
            self._abandon("a region was not answered for")
        if not self._incoming and not self._outgoing:
            return
        self._moving = False
        for chunks in (*self._incoming.values(), *self._outgoing):
            self._guarded(chunks.joined, self._progress, chunks, now)
        for transfer in [transfer for transfer, chunks in self._incoming.items() if chunks.done]:
            del self._incoming[transfer]
            self._host.send(Fetched(transfer))
        self._outgoing = [chunks for chunks in self._outgoing if not chunks.done]
        if now - self._moved > self._stall_s:
            self._abandon("a region has not moved")

    def _progress(self, chunks: Chunks, now: float) -> None:
        if chunks.progress():
            self._moved = self._active = now
            self._moving = True
