"""The controller's peers as processes and links: start, watch, fence, restart.

Each peer (kind, index) is one process at a time, its incarnations numbered as `launch/incarnations.py` says. Gateway and
runner may be survivors of an earlier epoch (`expect`): they keep the number of their launch. Of each kind one number is
welcome at a time; who comes with another one is told to end. A peer is SUSPECT after `suspect_after_s` without a heartbeat
and LOST after `lost_after_s` more, or at once when its process has exited.
Everything a peer does reaches the controller as one `Inbound` on one queue, so its core is a plain loop without locks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.config_service import StepConfig
from gyre_hpc.controller.peers.inbound import (
    NOT_STARTED,
    Connected,
    Exited,
    HostSaid,
    Inbound,
    PeerId,
    Replaced,
    Said,
    Suspected,
    Told,
)
from gyre_hpc.controller.peers.nodes import Nodes
from gyre_hpc.errors import NoRoom
from gyre_hpc.launch.elsewhere.remote import RemoteLauncher
from gyre_hpc.launch.incarnations import LAUNCHES_PER_EPOCH, OUTLIVE, command, launch_number, number_of
from gyre_hpc.launch.nodes.bad_nodes import BadNodes
from gyre_hpc.launch.plan import Launcher, ProcessHandle, ProcessSpec, SiteLauncher
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.links import LinkServer, PeerLink
from gyre_hpc.transport.messages import Message, PeerKind, ProcessEnded, Shutdown

log = logging.getLogger(__name__)
READ_OUT_S = 5.0
"""Longest wait for the end of a dead process's link: its socket may live on in a child, or its host be gone."""


@dataclass
class Peer:
    """One peer. `link` is None before its hello and after its end."""

    kind: PeerKind
    index: int
    launches: int = 0
    number: int = 0
    """Of the launch whose incarnations are welcome."""
    met: bool = False
    """Whether that launch has said hello."""
    external: bool = False
    """Somebody else starts its processes, each with a higher number than the one before."""
    handle: ProcessHandle | None = None
    link: PeerLink | None = None
    reader: asyncio.Task[None] | None = None
    launched_at: float = 0.0
    suspect: bool = False
    lost: bool = False
    dead: bool = False
    log: Path = Path()
    outbox: list[Message] = field(default_factory=list)
    launcher: Launcher | None = None
    """What starts a guest's processes; None: the run's own launcher."""

    @property
    def id(self) -> PeerId:
        return (self.kind, self.index)

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.index}"

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where its process runs, or ran; () on this host."""
        return self.handle.nodes if self.handle is not None else ()

    @property
    def where(self) -> str:
        """ " on NODE", for a line that names the peer."""
        return f" on {','.join(self.nodes)}" if self.nodes else ""


class Peers:
    """All peers of one controller."""

    def __init__(
        self, run: Path, cluster: ClusterConfig, launcher: SiteLauncher, server: LinkServer, epoch: int
    ) -> None:
        self._layout = RunLayout(run)
        self._cluster = cluster
        self.launcher = launcher
        self._server = server
        self._epoch = epoch
        self.peers: dict[PeerId, Peer] = {}
        self._forgotten: dict[PeerId, int] = {}
        """Launches of peers that were forgotten: no two processes share an incarnation."""
        self.hosts: dict[PeerLink, RemoteLauncher] = {}
        """Cell hosts whose cells are peers."""
        self.survivors: set[PeerKind] = set()
        """Kinds that were expected of an earlier epoch."""
        self.inbox: asyncio.Queue[Inbound] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self.nodes = Nodes(
            launcher,
            BadNodes(self._layout, cluster),
            lambda who, what: self.inbox.put_nowait(Told(who, what)),
        )

    def start_accepting(self) -> None:
        self._spawn(self._accept())

    async def launch(self, kind: PeerKind, index: int, launcher: Launcher | None = None) -> Peer:
        """Start (or restart) the peer's process, a guest's with the `launcher` of its host.

        Raises NoRoom; the peer then is dead, as it was.
        """
        before = self._forgotten.get((kind, index), 0)
        peer = self.peers.setdefault((kind, index), Peer(kind, index, launches=before))
        peer.launcher = launcher or peer.launcher
        peer.launches += 1
        peer.number = launch_number(self._epoch, peer.launches)
        peer.link, peer.reader, peer.suspect, peer.lost = None, None, False, False
        peer.dead, peer.met = False, False
        peer.launched_at = time.monotonic()
        peer.outbox.clear()
        try:
            peer.handle = await (peer.launcher or self.launcher).start(self._spec(peer))
        except NoRoom:
            peer.launches, peer.dead = peer.launches - 1, True
            raise
        log.info("%s is started%s", peer.name, peer.where)
        self._spawn(self._watch(peer, peer.launches, peer.handle))
        return peer

    async def launch_first(self, kind: PeerKind, index: int) -> None:
        """`launch`, where a peer that no node has room for counts as one that has ended."""
        try:
            await self.launch(kind, index)
        except NoRoom as error:
            log.warning("%s", error)
            self.inbox.put_nowait(Exited((kind, index), 0, NOT_STARTED))

    def expect(self, kind: PeerKind, incarnation: int, handle: ProcessHandle) -> None:
        """A process of an earlier epoch lives: its links are welcome, it is watched and ended like one of ours."""
        number = number_of(incarnation)
        peer = self.peers[kind, 0] = Peer(kind, 0, number=number, handle=handle, launched_at=time.monotonic())
        epoch, launches = divmod(number, LAUNCHES_PER_EPOCH)
        peer.log = self._log(peer, epoch, launches)
        self.survivors.add(kind)
        self._spawn(self._watch(peer, 0, handle))

    def expect_external(self, kind: PeerKind) -> None:
        """Processes of this kind come by themselves, from a job of their own; none is launched or killed here."""
        self.peers[kind, 0] = Peer(kind, 0, external=True)
        self.survivors.add(kind)

    def end_external(self, reason: str) -> None:
        """The run is over for them as well; who is not connected hears it from nobody."""
        for peer in self.peers.values():
            if peer.external and peer.link is not None:
                peer.link.send(Shutdown(reason))

    def all_here(self) -> bool:
        """Whether every external peer has a link."""
        return all(peer.link is not None for peer in self.peers.values() if peer.external)

    def missing(self) -> list[Peer]:
        """External peers without a link, or whose link is silent."""
        return [peer for peer in self.peers.values() if peer.external and (peer.link is None or peer.suspect)]

    async def replace(self, kind: PeerKind) -> None:
        """End a survivor, if it has not ended, and launch another process in its place."""
        handle = self.peers[kind, 0].handle
        if handle is not None:
            handle.kill()
            await handle.wait()
        await self.launch(kind, 0)

    def _log(self, peer: Peer, epoch: int, launches: int) -> Path:
        suffix = f".{launches}" if launches > 1 else ""
        return self._layout.logs(epoch) / f"{peer.name}{suffix}.log"

    def _spec(self, peer: Peer) -> ProcessSpec:
        argv = command(peer.kind, self._layout.root, peer.number)
        peer.log = path = self._log(peer, self._epoch, peer.launches)
        if peer.kind is not PeerKind.CELL:
            size: StepConfig = getattr(self._cluster.service, peer.kind)
            return ProcessSpec(
                name=peer.name,
                argv=argv,
                env={},
                log=path,
                cpus_per_rank=size.cpus,
                mem=size.mem,
                service=True,
                outlives=peer.kind in OUTLIVE,
                avoid=self.nodes.bad.names,
                never=self.nodes.never,
            )
        cell = self._cluster.cell
        return ProcessSpec(
            name=peer.name,
            argv=[*argv, "--cell", str(peer.index)],
            env={},
            log=path,
            nodes=cell.nodes,
            ranks=cell.ranks,
            cpus_per_rank=cell.cpus_per_rank,
            mem=cell.mem,
            gres=cell.gres,
            avoid=self.nodes.bad.names,
            never=self.nodes.never,
        )

    def send(self, kind: PeerKind, index: int, message: Message) -> None:
        """Send now, or as soon as the launched peer says hello. What a dead peer missed is its owner's to repeat."""
        peer = self.peers.get((kind, index))
        if peer is None:
            log.warning("%s-%d does not exist: %s dropped", kind, index, type(message).__name__)
        elif peer.link is not None:
            peer.link.send(message)
        else:
            peer.outbox.append(message)

    def address(self, kind: PeerKind, index: int = 0) -> str:
        """What the peer serves; "" before its hello."""
        peer = self.peers.get((kind, index))
        return peer.link.hello.address if peer is not None and peer.link is not None else ""

    def kill(self, kind: PeerKind, index: int) -> None:
        """End the process now; `Exited` follows."""
        peer = self.peers.get((kind, index))
        if peer is not None and peer.handle is not None:
            peer.handle.kill()
        elif peer is not None and peer.external and peer.link is not None:
            peer.link.abandon()  # it comes again, and is told everything again

    def dead(self) -> list[Peer]:
        """The run's own peers whose process has ended and was not relaunched."""
        return [peer for peer in self.peers.values() if peer.dead and peer.launcher is None]

    def fence(self, kind: PeerKind, index: int) -> None:
        """Hear nothing more of the peer, whose host is gone."""
        peer = self.peers.get((kind, index))
        if peer is not None and peer.link is not None:
            peer.link.abandon()

    def forget(self, kind: PeerKind, index: int) -> None:
        """The peer has ended; if it ever comes back, its launches go on being counted."""
        peer = self.peers.pop((kind, index), None)
        if peer is not None:
            self._forgotten[kind, index] = peer.launches

    def check_liveness(self) -> None:
        """Suspect the silent, kill the lost and the never-started; to be called about twice a second."""
        for peer in self.peers.values():
            if peer.external and peer.link is not None:
                self._judge(peer, peer.link.silent_s())
        alive = [
            peer for peer in self.peers.values() if peer.handle is not None and peer.handle.poll() is None
        ]
        for peer in alive:
            if peer.link is None:
                self._judge_start(peer)
            else:
                self._judge(peer, peer.link.silent_s())
        ours = [peer for peer in self.peers.values() if not peer.external]
        amiss = len(alive) < len(ours) or any(peer.link is None or peer.suspect for peer in alive)
        self.nodes.look(amiss, {node for peer in alive for node in peer.nodes if not peer.lost})

    def _judge_start(self, peer: Peer) -> None:
        """A process that has not said hello: srun waits for ever for a node that is gone."""
        assert peer.handle is not None
        usable, waited_s = self.nodes.usable, time.monotonic() - peer.launched_at
        gone = set() if usable is None else set(peer.nodes) - usable
        if peer.lost or (waited_s <= self._cluster.start_timeout_s and not gone):
            return
        peer.lost = True
        why = f"{', '.join(sorted(gone))} is lost" if gone else f"no hello within {waited_s:.0f} s"
        log.error("%s%s cannot start: %s", peer.name, peer.where, why)
        peer.handle.kill()

    def _judge(self, peer: Peer, silent_s: float) -> None:
        late = silent_s > self._cluster.suspect_after_s
        if late != peer.suspect:
            peer.suspect = late
            (self.nodes.fell_silent if late else self.nodes.heard)(peer.nodes)
            state = "SUSPECT" if late else "alive again"
            log.warning("%s%s is %s (silent for %.1f s)", peer.name, peer.where, state, silent_s)
            self.inbox.put_nowait(Suspected(peer.id, recovered=not late))
        lost = silent_s > self._cluster.suspect_after_s + self._cluster.lost_after_s
        if lost and not peer.lost and peer.handle is not None:
            peer.lost = True
            log.error("%s%s is LOST: silent for %.1f s; ending its process", peer.name, peer.where, silent_s)
            peer.handle.kill()

    async def shut_down(self, reason: str, grace_s: float) -> None:
        """Ask all peers to end; terminate those that do not within `grace_s`."""
        alive = [
            peer for peer in self.peers.values() if peer.handle is not None and peer.handle.poll() is None
        ]
        for peer in alive:
            if peer.link is not None:
                peer.link.send(Shutdown(reason))
        waits = [asyncio.create_task(self._end(peer, grace_s)) for peer in alive]
        if waits:
            await asyncio.wait(waits)
        self.nodes.close()
        for task in self._tasks:
            task.cancel()
        await self._server.close()

    @staticmethod
    async def _end(peer: Peer, grace_s: float) -> None:
        assert peer.handle is not None
        try:
            await asyncio.wait_for(peer.handle.wait(), grace_s if peer.link is not None else 0.1)
        except TimeoutError:
            await peer.handle.terminate(5.0)

    async def _accept(self) -> None:
        while True:
            link = await self._server.accept()
            if link.hello.kind is PeerKind.CELL_HOST:
                self._spawn(self._read_host(link))
            else:
                self._adopt(link)

    async def _read_host(self, link: PeerLink) -> None:
        """A host is nobody's child: it comes by itself, and the first it says is what it offers."""
        while (message := await link.receive()) is not None:
            if isinstance(message, ProcessEnded) and link in self.hosts:
                self.hosts[link].ended(message)
            else:
                self.inbox.put_nowait(HostSaid(link, message))
        if link in self.hosts:
            self.hosts.pop(link).lost()
        self.inbox.put_nowait(HostSaid(link, None))

    def _adopt(self, link: PeerLink) -> None:
        peer = self.peers.get((link.hello.kind, link.hello.index))
        number = number_of(link.incarnation)
        if peer is not None and peer.external and number > peer.number:
            self._replace_external(peer, number)
        if peer is None or peer.dead or number != peer.number:
            log.warning("%s is not a peer of this controller: it is told to end", link.name)
            self._spawn(_dismiss(link))
            return
        again, peer.met = peer.met, True
        peer.link, peer.suspect = link, False
        self.inbox.put_nowait(Connected(peer.id, again))
        for message in peer.outbox:
            link.send(message)
        peer.outbox.clear()
        peer.reader = self._spawn(self._read(peer, link))

    def _replace_external(self, peer: Peer, number: int) -> None:
        if peer.met:
            peer.outbox.clear()
            self.inbox.put_nowait(Replaced(peer.id))
        peer.number, peer.met = number, False

    async def _read(self, peer: Peer, link: PeerLink) -> None:
        while (message := await link.receive()) is not None:
            if peer.link is link:
                self.inbox.put_nowait(Said(peer.id, message))
        if peer.external and peer.link is link:
            log.warning("%s is away: its link has ended", peer.name)
            peer.link = None

    async def _watch(self, peer: Peer, launch: int, handle: ProcessHandle) -> None:
        """`Exited` once the process has ended, behind everything it had sent before."""
        code = await handle.wait()
        if peer.launches == launch and peer.reader is not None:
            await asyncio.wait({peer.reader}, timeout=READ_OUT_S)
        if peer.launches == launch:
            peer.link, peer.dead = None, True
            self.inbox.put_nowait(Exited(peer.id, launch, code))

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _dismiss(link: PeerLink) -> None:
    link.send(Shutdown("another process has its place in this run"))
    await link.close()
