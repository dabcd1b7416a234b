"""MPI of one peer process: the channel of its link to the controller, and the pairs over which it fetches regions.

It asks for its channel when its endpoint is ready, and again some time after it was lost; everything else it is told.
Losing the channel costs nothing but the path: the link goes back to its socket. Called from the peer's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from gyre_hpc.config import RunConfig, TransportConfig
from gyre_hpc.errors import ProtocolViolation, StorageFull
from gyre_hpc.transport.links import Link
from gyre_hpc.transport.messages import (
    AcceptChannel,
    ChannelGone,
    ChannelJoined,
    ChannelsOff,
    ChannelWanted,
    JoinChannel,
    Message,
    PortPosted,
)
from gyre_hpc.transport.mpi.fetching import MpiFailed, Transfers
from gyre_hpc.transport.mpi.host import EndpointHost, socket_path
from gyre_hpc.transport.mpi.wire import (
    Accept,
    Carry,
    Dropped,
    Fetched,
    Join,
    Joined,
    Moved,
    PortOpened,
    Ready,
    ToHost,
    Unfit,
)
from gyre_hpc.transport.regions import run_key

log = logging.getLogger(__name__)
CONTROLLER: Final = "controller"
TICK_S: Final = 0.25
AGAIN_S: Final = (1.0, 60.0)
"""First and longest wait before a lost channel is asked for again; doubled each time, until one lasts that long."""


class PeerSide:
    """One peer's channels. `link` is its link, `path` the socket for its endpoint."""

    def __init__(self, link: Link, path: Path, transport: TransportConfig) -> None:
        self._link, self._transport = link, transport
        self._host = EndpointHost(path, transport.join_s, self._heard, self._endpoint_lost)
        self._channel: int | None = None
        self._opened_at = 0.0
        self._wait_s = AGAIN_S[0]
        self._ask_at: float | None = None
        self._joining: dict[int, str] = {}
        self._pairs: dict[str, asyncio.Future[int]] = {}
        self._transfers = Transfers()
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen for the endpoint."""
        try:
            await self._host.start()
        except (OSError, StorageFull) as error:
            self._heard(Unfit(f"no socket for an endpoint at {self._host.path} ({error})"))
        self._ticking = asyncio.create_task(self._tick())

    def close(self) -> None:
        """Back to the socket; the endpoint leaves."""
        if self._ticking is not None:
            self._ticking.cancel()
        self._link.channel.close()
        self._host.close()

    # ---- what the controller says -------------------------------------------------------------------------------

    def told(self, message: Message) -> bool:
        """Take a message about channels; False if it is about something else."""
        match message:
            case AcceptChannel(channel=channel, joiner=joiner):
                if self._host.ready:
                    self._host.send(Accept(channel, joiner))
                else:
                    self._link.send(ChannelGone(channel, "no endpoint is up here"))
            case JoinChannel(channel=channel, acceptor=acceptor, port=port, nonce=nonce):
                self._joining[channel] = acceptor
                if self._host.ready:
                    self._host.send(Join(channel, acceptor, port, nonce))
                else:
                    self._gone(channel, "no endpoint is up here", tell=True)
            case ChannelGone(channel=channel, reason=reason, acceptor=acceptor):
                self._host.drop(channel, reason)
                self._gone(channel, reason, tell=False)
                if acceptor in self._pairs and not self._pairs[acceptor].done():
                    self._end_pair(acceptor, reason)
            case _:
                return False
        return True

    # ---- what the endpoint says ---------------------------------------------------------------------------------

    def _heard(self, message: ToHost) -> None:
        match message:
            case Ready(library=library):
                log.info("MPI endpoint: %s", library)
                self._ask()
            case Unfit(reason=reason):
                log.error("MPI is off here, sockets go on: %s", reason)
                self._link.send(ChannelsOff(reason))
            case PortOpened(channel=channel, port=port, nonce=nonce):
                self._link.send(PortPosted(channel, port, nonce))
            case Joined(channel=channel, seconds=seconds):
                self._link.send(ChannelJoined(channel))
                self._joined(channel, seconds)
            case Carry(channel=channel, data=data):
                if channel == self._channel:
                    self._arrived(channel, data)
            case Dropped(channel=channel, reason=reason):
                self._gone(channel, reason, tell=True)
            case Moved() | Fetched():
                self._transfers.heard(message)
            case _:
                pass

    def _ask(self) -> None:
        self._ask_at = None
        self._link.expect_channel()
        self._link.send(ChannelWanted(CONTROLLER))

    def _joined(self, channel: int, seconds: float) -> None:
        acceptor = self._joining.pop(channel, None)
        if acceptor == CONTROLLER:
            self._channel, self._opened_at = channel, time.monotonic()
            self._link.open_channel(lambda data: self._host.carry(channel, data))
            log.info("channel %d to the controller is up after %.0f ms", channel, seconds * 1000)
        elif acceptor is not None:
            pair = self._pairs.get(acceptor)
            if pair is not None and not pair.done():
                pair.set_result(channel)
            log.info("channel %d to %s is up after %.0f ms", channel, acceptor, seconds * 1000)

    def _arrived(self, channel: int, data: bytes) -> None:
        try:
            self._link.channel.arrived(data, time.monotonic())
        except (msgspec.DecodeError, ProtocolViolation) as error:
            self._host.drop(channel, str(error))
            self._gone(channel, str(error), tell=True)

    def _gone(self, channel: int, reason: str, *, tell: bool) -> None:
        """The channel is over here; `tell` the controller, which tells the other side."""
        acceptor = self._joining.pop(channel, None)
        if channel == self._channel:
            self._channel = None
            again = self._link.channel.close()
            log.warning(
                "channel %d is lost (%s): the socket takes over, %d messages again", channel, reason, again
            )
            lasted = time.monotonic() - self._opened_at
            self._wait_s = AGAIN_S[0] if lasted > AGAIN_S[1] else min(self._wait_s * 2, AGAIN_S[1])
        for owner, pair in list(self._pairs.items()):
            if owner == acceptor or (pair.done() and not pair.exception() and pair.result() == channel):
                self._end_pair(owner, reason)
        if tell:
            self._link.send(ChannelGone(channel, reason))
        if self._host.ready and self._channel is None and CONTROLLER not in self._joining.values():
            self._ask_at = self._ask_at or time.monotonic() + self._wait_s

    def _end_pair(self, owner: str, reason: str) -> None:
        pair = self._pairs.pop(owner, None)
        if pair is not None and not pair.done():
            pair.set_exception(MpiFailed(reason))
            pair.exception()

    def _endpoint_lost(self, reason: str) -> None:
        reason = f"the MPI endpoint here is gone: {reason}"
        for channel in [*self._joining, *([] if self._channel is None else [self._channel])]:
            self._gone(channel, reason, tell=True)
        for owner in list(self._pairs):
            self._end_pair(owner, reason)
        self._transfers.lost(reason)
        self._ask_at = None

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._host.check(now)
            reason = self._link.channel.tick(
                now, heartbeat_s=self._transport.heartbeat_s, silent_s=self._transport.silent_s
            )
            if reason and self._channel is not None:
                self._host.drop(self._channel, reason)
                self._gone(self._channel, reason, tell=True)
            if self._ask_at is not None and now >= self._ask_at and self._host.ready:
                self._ask()

    # ---- regions ------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether an endpoint with MPI is up here."""
        return self._host.ready

    async def fetch(self, owner: str, path: str, total: int, into: str, moved: Callable[[int], None]) -> None:
        """Fill the file `into` with the region file `path` of `owner`; `moved` is told how much of it is there.

        Raises MpiFailed. After that, or when it is cancelled, the endpoint may write there for a moment more.
        """
        await self._transfers.fetch(self._host, await self._pair(owner), path, total, into, moved)

    async def _pair(self, owner: str) -> int:
        if not self._host.ready:
            raise MpiFailed("no MPI endpoint is up here")
        if owner not in self._pairs:
            self._pairs[owner] = asyncio.get_running_loop().create_future()
            self._link.send(ChannelWanted(owner))
        pair = self._pairs[owner]
        try:
            return await asyncio.wait_for(asyncio.shield(pair), 2 * self._transport.join_s)
        except TimeoutError as error:
            self._end_pair(owner, "not joined in time")
            raise MpiFailed(f"no channel to {owner} within {2 * self._transport.join_s:g} s") from error


def make_peer_side(
    config: RunConfig, name: str, incarnation: int, link: Link, secret: bytes
) -> PeerSide | None:
    """The channels of peer `name` of a run with transport=mpi, not yet started; None otherwise."""
    if config.transport.kind != "mpi":
        return None
    return PeerSide(link, socket_path(run_key(secret), name, incarnation), config.transport)
