"""MPI beside the controller's links (transport=mpi): the bridge, an endpoint per cell, and who joins whom.

The bridge is the controller's endpoint; all endpoints (`endpoints.py`) may die at any time. One join at a time in the
whole run: a side that accepts serves no other meanwhile, and two that wait for each other would wait for ever. A join
that is not done in time is given up, and the endpoints it is stuck in are killed by their hosts. Every loss of a channel
sends its link back to the socket and is logged with cell and node. MPI that cannot work (another library, another plugin)
is named once; its host stays on sockets for good.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from gyre_hpc.config import RunConfig
from gyre_hpc.controller.peers.endpoints import Endpoints
from gyre_hpc.controller.peers.inbound import PeerId
from gyre_hpc.controller.peers.peers import Peers
from gyre_hpc.errors import ProtocolViolation, StorageFull
from gyre_hpc.launch.plan import CONTROLLER
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport import messages as msg
from gyre_hpc.transport.links import PeerLink
from gyre_hpc.transport.messages import PeerKind
from gyre_hpc.transport.mpi import wire
from gyre_hpc.transport.mpi.host import EndpointHost, socket_path
from gyre_hpc.transport.regions import run_key

log = logging.getLogger(__name__)
TICK_S = 0.25
GIVE_UP_S = 5.0
"""A join is forgotten so long after the endpoints must have ended themselves."""
ABOUT_CHANNELS = (msg.ChannelWanted, msg.PortPosted, msg.ChannelJoined, msg.ChannelGone, msg.ChannelsOff)


def owner_name(peer: PeerId) -> str:
    """The name under which a peer owns regions and joins channels."""
    kind, index = peer
    return f"cell-{index}" if kind is PeerKind.CELL else str(kind)


@dataclass
class Join:
    """One channel on its way, or standing. `said`: the sides that have it."""

    channel: int
    joiner: str
    acceptor: str
    began: float = 0.0
    said: set[str] = field(default_factory=set)


class Channels:
    """All channels of one controller."""

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        secret: bytes,
        epoch: int,
        peers: Peers,
        fault: Callable[[str, str], None],
    ) -> None:
        self._config, self._layout, self._epoch = config, layout, epoch
        self._peers, self._fault = peers, fault
        self._run_key = run_key(secret)
        self._bridge = EndpointHost(
            socket_path(self._run_key, CONTROLLER, epoch),
            config.transport.join_s,
            self._bridge_said,
            self._bridge_lost,
        )
        self._names: dict[str, PeerId] = {}
        self._endpoints = Endpoints(config, layout, epoch, peers.launcher, self._end_all_of, self._off)
        self._serial = 0
        self._waiting: deque[tuple[str, str]] = deque()
        self._current: Join | None = None
        self._standing: dict[int, Join] = {}
        self._ticking: asyncio.Task[None] | None = None
        self.joins = 0
        """Command channels that ever stood."""

    async def start(self) -> None:
        """Listen for the bridge and start it."""
        self._endpoints.run(CONTROLLER, CONTROLLER, self._bridge.path)
        try:
            await self._bridge.start()
        except (OSError, StorageFull) as error:
            self._off(CONTROLLER, f"the controller cannot listen at {self._bridge.path} ({error})")
        self._ticking = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """All links back to the socket; endpoints leave, or are killed."""
        for name in list(self._names):
            link = self._link(name)
            if link is not None:
                link.channel.close()
        self._endpoints.give_up(CONTROLLER)
        self._bridge.close()
        await self._endpoints.close()
        if self._ticking is not None:
            self._ticking.cancel()

    # ---- what peers say and do ----------------------------------------------------------------------------------

    def connected(self, peer: PeerId) -> None:
        """A peer's process has come up: an endpoint goes beside it. Guests stay on sockets."""
        name = owner_name(peer)
        self.exited(peer)
        if self._peers.peers[peer].launcher is not None:
            return
        link = self._peers.peers[peer].link
        if link is None:
            return
        self._names[name] = peer
        link.expect_channel()
        path = socket_path(self._run_key, name, link.incarnation)
        self._endpoints.run(name, self._peers.peers[peer].name, path)

    def exited(self, peer: PeerId) -> None:
        """The peer's process has ended: so does what stood with it."""
        name = owner_name(peer)
        self._names.pop(name, None)
        self._endpoints.end(name)
        self._end_all_of(name, f"{name} has ended")

    def said(self, peer: PeerId, message: msg.Message) -> None:
        """One of ABOUT_CHANNELS."""
        name = owner_name(peer)
        match message:
            case msg.ChannelWanted(acceptor=acceptor):
                self._want(name, acceptor)
            case msg.PortPosted(channel=channel, port=port, nonce=nonce):
                self._port_posted(channel, port, nonce)
            case msg.ChannelJoined(channel=channel):
                self._joined(channel, name)
            case msg.ChannelGone(channel=channel, reason=reason):
                self._gone(channel, name, reason)
            case msg.ChannelsOff(reason=reason):
                self._off(name, reason)
            case _:
                raise ProtocolViolation(f"{name} sent {type(message).__name__} about channels")

    # ---- joins, one at a time -----------------------------------------------------------------------------------

    def _want(self, joiner: str, acceptor: str) -> None:
        known = acceptor == CONTROLLER or acceptor in self._names
        if not known or acceptor == joiner:
            self._tell(joiner, msg.ChannelGone(-1, f"{acceptor} has no endpoint", acceptor))
            return
        self._endpoints.is_ready(joiner)
        if (joiner, acceptor) not in self._waiting:
            self._waiting.append((joiner, acceptor))
        self._next()

    def _next(self) -> None:
        """Let the next acceptor post its accept."""
        while self._current is None and self._waiting:
            pair = next((pair for pair in self._waiting if pair[1] != CONTROLLER or self._bridge.ready), None)
            if pair is None:
                return
            self._waiting.remove(pair)
            self._serial += 1
            join = Join(self._serial, *pair, began=time.monotonic())
            self._current = self._standing[join.channel] = join
            if join.acceptor == CONTROLLER:
                self._bridge.send(wire.Accept(join.channel, join.joiner))
            else:
                self._tell(join.acceptor, msg.AcceptChannel(join.channel, join.joiner))

    def _port_posted(self, channel: int, port: str, nonce: bytes) -> None:
        join = self._current
        if join is not None and join.channel == channel:
            self._tell(join.joiner, msg.JoinChannel(channel, join.acceptor, port, nonce))

    def _joined(self, channel: int, name: str) -> None:
        join = self._standing.get(channel)
        if join is None or name not in (join.joiner, join.acceptor):
            return
        join.said.add(name)
        if name == CONTROLLER:
            link = self._link(join.joiner)
            if link is not None:
                link.open_channel(lambda data: self._bridge.carry(channel, data))
                self.joins += 1
        if len(join.said) == 2:
            seconds = time.monotonic() - join.began
            log.info(
                "channel %d: %s has joined %s in %.0f ms", channel, join.joiner, join.acceptor, seconds * 1000
            )
            if join is self._current:
                self._current = None
                self._next()

    def _gone(self, channel: int, said_by: str, reason: str) -> None:
        """A channel has ended, or will not come about; both sides are told but the one that said it."""
        join = self._standing.pop(channel, None)
        if join is None:
            return
        if join.acceptor == CONTROLLER:
            self._back_to_socket(join, reason)
        for name in (join.joiner, join.acceptor):
            if name == CONTROLLER:
                self._bridge.drop(channel, reason)
            elif name != said_by:
                self._tell(name, msg.ChannelGone(channel, reason, join.acceptor))
        if join is self._current:
            self._current = None
            self._next()

    def _back_to_socket(self, join: Join, reason: str) -> None:
        link = self._link(join.joiner)
        if link is None:
            return
        again = link.channel.close()
        self._fault(
            join.joiner,
            f"MPI channel lost ({reason}): on the socket of {link.hello.host}, {again} messages again",
        )

    def _end_all_of(self, name: str, reason: str) -> None:
        self._waiting = deque(pair for pair in self._waiting if pair[0] != name)
        for join in [join for join in self._standing.values() if name in (join.joiner, join.acceptor)]:
            self._gone(join.channel, name, reason)

    # ---- the bridge ---------------------------------------------------------------------------------------------

    def _bridge_said(self, message: wire.ToHost) -> None:
        match message:
            case wire.Ready(library=library):
                log.info("MPI bridge: %s", library)
                self._endpoints.is_ready(CONTROLLER)
                self._next()
            case wire.Unfit(reason=reason):
                self._off(CONTROLLER, reason)
            case wire.PortOpened(channel=channel, port=port, nonce=nonce):
                self._port_posted(channel, port, nonce)
            case wire.Joined(channel=channel):
                self._joined(channel, CONTROLLER)
            case wire.Dropped(channel=channel, reason=reason):
                self._gone(channel, CONTROLLER, reason)
            case wire.Carry(channel=channel, data=data):
                self._arrived(channel, data)
            case _:
                pass

    def _arrived(self, channel: int, data: bytes) -> None:
        join = self._standing.get(channel)
        link = self._link(join.joiner) if join is not None else None
        if link is None:
            return
        try:
            link.channel.arrived(data, time.monotonic())
        except (msgspec.DecodeError, ProtocolViolation) as error:
            self._gone(channel, CONTROLLER, str(error))

    def _bridge_lost(self, reason: str) -> None:
        self._end_all_of(CONTROLLER, f"the MPI bridge is gone: {reason}")

    def _off(self, name: str, reason: str) -> None:
        """MPI cannot work beside this host; without the bridge it can work beside none."""
        self._endpoints.give_up(name)
        who = "all cells stay" if name == CONTROLLER else "it stays"
        self._fault(name, f"MPI is off, {who} on sockets: {reason}")

    # ---- time ---------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now, transport = time.monotonic(), self._config.transport
            self._bridge.check(now)
            join = self._current
            if join is not None and now - join.began > transport.join_s + GIVE_UP_S:
                self._gone(join.channel, "", f"no join within {transport.join_s:g} s")
            for join in list(self._standing.values()):
                link = self._link(join.joiner) if join.acceptor == CONTROLLER else None
                if link is None:
                    continue
                reason = link.channel.tick(
                    now, heartbeat_s=transport.heartbeat_s, silent_s=transport.silent_s
                )
                if reason:
                    self._gone(join.channel, CONTROLLER, reason)

    # ---- small things -------------------------------------------------------------------------------------------

    def _link(self, name: str) -> PeerLink | None:
        peer = self._peers.peers.get(self._names[name]) if name in self._names else None
        return None if peer is None else peer.link

    def _tell(self, name: str, message: msg.Message) -> None:
        link = self._link(name)
        if link is not None:
            link.send(message)


def make_channels(
    config: RunConfig,
    layout: RunLayout,
    secret: bytes,
    epoch: int,
    peers: Peers,
    fault: Callable[[str, str], None],
) -> Channels | None:
    """The channels of a run with transport=mpi on Slurm, None otherwise."""
    if config.transport.kind != "mpi":
        return None
    if config.cluster.kind != "slurm":
        fault(CONTROLLER, "MPI is off, all cells stay on sockets: MPI endpoints are steps of a Slurm job")
        return None
    return Channels(config, layout, secret, epoch, peers, fault)
