"""The loop of an endpoint: its host's wishes, frames of its channels, chunks of its transfers, one thread.

It waits on the host's socket with a time limit and looks at MPI in between. The limit grows from nothing (a transfer moves)
over MOVING_WAIT_S (it waits for the other side, which may need this CPU), HOT_WAIT_S (a frame came a moment ago) and
WARM_WAIT_S (a region moved in the last seconds: others want it too) to IDLE_WAIT_S: an idle endpoint looks 200 times a second.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Final, NoReturn, ParamSpec

import msgspec

from gyre_hpc.errors import ProtocolViolation
from gyre_hpc.transport.mpi import joined as joins
from gyre_hpc.transport.mpi.host_socket import HostSocket
from gyre_hpc.transport.mpi.joined import Joined
from gyre_hpc.transport.mpi.library import MPI
from gyre_hpc.transport.mpi.traffic import Traffic
from gyre_hpc.transport.mpi.transfers import Chunks
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
    GiveUp,
    Join,
    Leave,
    PortOpened,
    Reply,
    Stop,
    Stopped,
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
WARM_S: Final = 2.0
WARM_WAIT_S: Final = 0.001
IDLE_WAIT_S: Final = 0.005
ALIVE_S: Final = 1.0
EXIT_STUCK: Final = 70
LEAVE_S: Final = 0.2


class Service:
    """One endpoint's channels and transfers."""

    def __init__(self, host: HostSocket, name: str, secret: bytes, join_s: float, stall_s: float) -> None:
        self._host, self._name, self._secret = host, name, secret
        self._join_s = join_s
        self._channels: dict[int, Joined] = {}
        self._traffic = Traffic(run_key(secret), stall_s, host.send)
        self._active = time.monotonic()
        self._moved_at = float("-inf")
        self._told = 0.0
        self._moved = False

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
        if self._traffic.moving:
            return 0.0 if self._moved else MOVING_WAIT_S
        now = time.monotonic()
        if self._traffic.waiting or now - self._active < HOT_S:
            return HOT_WAIT_S
        return WARM_WAIT_S if now - self._moved_at < WARM_S else IDLE_WAIT_S

    def _tell_alive(self) -> None:
        now = time.monotonic()
        if now - self._told >= ALIVE_S:
            self._told = now
            self._traffic.tidy()
            if self._traffic.clogged:
                self._abandon("channels that have ended hold on to too much memory")
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
        self._traffic.forget(number, reason)

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
                self._traffic.forget(number, "the channel has ended")
            case Fetch(channel=number) if number in self._channels:
                self._guarded(self._channels[number], self._traffic.fetch, self._channels[number], message)
            case GiveUp(transfer=transfer):
                pull = self._traffic.pull(transfer)
                if pull is not None:
                    self._guarded(pull.joined, self._traffic.give_up, pull)
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
                    self._traffic.serve(channel, frame)
                case Reply(transfer=transfer, reason=reason):
                    self._traffic.answered(transfer, reason)
                case Stop():
                    self._traffic.stop(channel, frame)
                case Stopped(transfer=transfer, bytes=sent):
                    self._traffic.stopped(transfer, sent)
                case Bye():
                    self._drop(channel.channel, "the other side has left")
                    return
                case _:
                    raise ProtocolViolation(f"{type(frame).__name__} on a joined channel")

    def _transfer(self) -> None:
        now = time.monotonic()
        self._moved = False
        for chunks in list(self._traffic.under_way()):
            if chunks.joined.channel in self._channels:
                self._guarded(chunks.joined, self._progress, chunks, now)

    def _progress(self, chunks: Chunks, now: float) -> None:
        if self._traffic.progress(chunks, now):
            self._moved = True
            self._moved_at = self._active = now
