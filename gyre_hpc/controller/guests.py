"""Cells that run in another job, or on another machine, and may vanish at any time.

A cell host offers room; each of its cells gets an id that no cell of the run has had and is started through it. A host whose
link broke and that comes back to the same controller gets the ids it had. A guest
that dies is started again while its host is there, a few times per host, which costs the run none of its `cluster.restarts`.
A host that says it must end has its cells leave in order: calls move on, a contribution is handed over if the batch closes
in time. When the host is gone, its cells are lost at once, are not started elsewhere, and their rows stay inert. All
methods but `launch_the_awaited` are called from the controller's loop and return at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gyre_hpc.config import RunConfig
from gyre_hpc.controller.cells.cell_table import CellTable
from gyre_hpc.controller.cells.phases import Phase
from gyre_hpc.controller.journal.entries import GuestsJoined
from gyre_hpc.controller.journal.history import History
from gyre_hpc.controller.journal.journal import Journal
from gyre_hpc.controller.monitor.observer import Observer
from gyre_hpc.controller.peers.peers import Peers
from gyre_hpc.controller.peers.supervision import INCURABLE
from gyre_hpc.controller.training.batches import BatchRunner
from gyre_hpc.launch.elsewhere.remote import RemoteLauncher, RemoteProcess
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CellId
from gyre_hpc.schedule.protocol import CellKind
from gyre_hpc.transport import messages as msg
from gyre_hpc.transport.links import PeerLink
from gyre_hpc.transport.messages import PeerKind

log = logging.getLogger(__name__)
RESTARTS: Final = 3
"""Restarts of cells on one host; one more death and the cell is given up."""
MARGIN_S: Final = 5.0
"""Of a host's last seconds, those in which its cells' processes must end."""
NOTICE_S: Final = 30.0
"""Seconds that cells with a SIGTERM are taken to have: Slurm's KillWait by default; a shorter time loses them as any end does."""


@dataclass(eq=False)
class Host:
    """One cell host. `cells`: those that may still come back. `leaves_at`: the latest its cells are told to end."""

    link: PeerLink
    launcher: RemoteLauncher
    kind: CellKind
    job: str
    cells: set[CellId] = field(default_factory=set)
    restarts: int = 0
    leaves_at: float | None = None
    told: set[CellId] = field(default_factory=set)
    """Cells that were told to end."""

    @property
    def name(self) -> str:
        where = f"{self.link.hello.host} (pid {self.link.hello.pid})"
        return f"job {self.job} on {where}" if self.job else where


@dataclass
class Guests:
    """All hosts of one controller. `over` says whether the run takes no cells any more."""

    config: RunConfig
    layout: RunLayout
    peers: Peers
    cells: CellTable
    batches: BatchRunner
    journal: Journal
    history: History
    observer: Observer
    over: Callable[[], bool]
    clock: Callable[[], float] = time.monotonic
    _hosts: list[Host] = field(default_factory=list)
    _away: dict[tuple[str, int, CellKind], list[CellId]] = field(default_factory=dict)
    """Cells of hosts that are gone, by the host's name and number: it may come back."""
    _awaited: list[tuple[Host, CellId]] = field(default_factory=list)
    """Cells whose process is to be started."""

    def has(self, cell: CellId) -> bool:
        """Whether the cell is a guest."""
        return cell in self.cells.cells and self.cells.cells[cell].kind in (
            CellKind.SATELLITE,
            CellKind.ROLLOUT,
        )

    # ---- hosts --------------------------------------------------------------------------------------------------

    def said(self, link: PeerLink, message: msg.Message | None) -> None:
        """What a host says; None: its link has ended, and it with it."""
        host = next((host for host in self._hosts if host.link is link), None)
        match message:
            case msg.OfferCells() if host is None and message.cells > 0 and not self.over():
                self._welcome(link, message)
            case msg.LeaveCells(grace_s=grace_s, reason=reason) if host is not None:
                if host.leaves_at is None:
                    self._leave(host, grace_s, reason)
            case None if host is not None:
                self._gone(host)
            case msg.Goodbye() | None:
                pass
            case _:
                log.warning("%s: %s is of no use", link.name, type(message).__name__)
                link.send(msg.Shutdown("the run has no use for these cells"))

    def _welcome(self, link: PeerLink, offer: msg.OfferCells) -> None:
        kind = CellKind.ROLLOUT if offer.rollout_only else CellKind.SATELLITE
        host = Host(link, RemoteLauncher(link.send, self.layout), kind, offer.job)
        known = self._away.pop(_identity(host), [])[: offer.cells]
        first = self.config.cluster.cells + self.history.guests
        fresh = tuple(CellId(id) for id in range(first, first + offer.cells - len(known)))
        self._hosts.append(host)
        self.peers.hosts[link] = host.launcher
        if fresh:
            self.journal.append(GuestsJoined(time.time(), fresh, kind, offer.job, link.hello.host))
        for id in fresh:
            self.cells.add(id, self.config.engine.capacity, known=False, kind=kind)
            self._await(host, id)
        for id in known:
            self._take_back(host, id)
        ids = (*known, *fresh)
        use = "serve calls" if offer.rollout_only else "serve calls and train"
        self.observer.guests(f"{_named(ids)} join from {host.name}: they {use}")

    def _await(self, host: Host, id: CellId) -> None:
        host.cells.add(id)
        self._awaited.append((host, id))
        self.observer.came(id)

    def _take_back(self, host: Host, id: CellId) -> None:
        """Start the cell again; one whose end has not been heard yet, at its end, which costs its host nothing."""
        cell = self.cells.cells[id]
        if cell.gone:
            cell.gone = cell.departing = cell.deserted = False
            self._await(host, id)
        else:
            host.cells.add(id)
            host.restarts -= 1

    def _leave(self, host: Host, grace_s: float, reason: str) -> None:
        self.observer.guests(f"{_named(host.cells)} leave with {host.name}: {reason}")
        host.leaves_at = self.clock() + max(0.0, grace_s - MARGIN_S)
        for cell in sorted(host.cells):
            if self.cells.cells[cell].phase is Phase.TRAINING:
                self.batches.flush_leaver(cell)
            self.cells.depart(cell)
        self._end_the_deserted(host)

    def asked_to_end(self, cell: CellId) -> None:
        """SIGTERM came to a cell: its job is about to end. A preemption tells the steps, and the host nothing."""
        host = next((host for host in self._hosts if cell in host.cells), None)
        if host is not None and host.leaves_at is None:
            self._leave(host, NOTICE_S, "SIGTERM came to its cells")
            host.link.send(msg.LeaveCells(NOTICE_S, "SIGTERM to its cells"))

    def _gone(self, host: Host) -> None:
        if host.cells:
            self.observer.fault(host.name, f"gone, and {_named(host.cells)} with it")
        self._hosts.remove(host)
        if host.leaves_at is None:
            self._away[_identity(host)] = sorted(host.cells)
        for cell in host.cells:
            self.peers.fence(PeerKind.CELL, cell)

    def tick(self) -> None:
        """To be called a few times a second: end cells that may leave, and hosts that are silent for too long."""
        patience = self.config.cluster.suspect_after_s + self.config.cluster.lost_after_s
        for host in self._hosts:
            self._end_the_deserted(host)
            if host.link.silent_s() > patience:
                log.error("%s is LOST: silent for %.1f s", host.name, host.link.silent_s())
                host.link.abandon()

    def dismiss(self, reason: str) -> None:
        """The run is over: hosts end once their cells have."""
        for host in self._hosts:
            host.link.send(msg.Shutdown(reason))

    # ---- their cells --------------------------------------------------------------------------------------------

    async def launch_the_awaited(self) -> None:
        """Start, or start again, cells on their hosts."""
        awaited, self._awaited = self._awaited, []
        for host, id in awaited:
            again = self.cells.cells[id].phase is Phase.LOST
            if host.leaves_at is not None:
                self.cells.lost(id)
                self._give_up(host, id)
                continue
            await self.peers.launch(PeerKind.CELL, id, host.launcher)
            if again:
                self.cells.restarted(id)

    def exited(self, cell: CellId, code: int, why: str) -> None:
        """The cell is lost and its process has ended: start it again, or give it up. 0: its own job told it to end."""
        host = next((host for host in self._hosts if cell in host.cells), None)
        lost = self._lost_nodes(cell)
        told = not lost and (code == 0 or self.cells.cells[cell].departing)
        if lost:
            self.observer.fault(f"cell-{cell}", f"lost with node {', '.join(lost)}")
        elif told:
            self.observer.guests(f"cell-{cell} has left the run")
        else:
            self.observer.fault(f"cell-{cell}", why)
        if host is not None and not told and code not in INCURABLE and host.restarts < RESTARTS:
            host.restarts += 1
            self._awaited.append((host, cell))
        else:
            self._give_up(host, cell)

    def _lost_nodes(self, cell: CellId) -> tuple[str, ...]:
        peer = self.peers.peers.get((PeerKind.CELL, cell))
        handle = peer.handle if peer is not None else None
        return handle.lost if isinstance(handle, RemoteProcess) else ()

    def _give_up(self, host: Host | None, cell: CellId) -> None:
        self.cells.cells[cell].gone = True
        self.peers.forget(PeerKind.CELL, cell)
        self.observer.gone(cell)
        if host is not None:
            host.cells.discard(cell)
            if not host.cells:
                host.link.send(msg.Shutdown("none of its cells is left"))

    def _end_the_deserted(self, host: Host) -> None:
        """A leaving cell ends once no call is on it and no contribution of it is awaited, or when its time is over."""
        if host.leaves_at is None:
            return
        for cell in [self.cells.cells[id] for id in sorted(host.cells)]:
            drains = cell.phase is Phase.LEAVING and not cell.deserted
            awaited = drains or self.batches.owes(cell.id)
            if cell.id in host.told or (awaited and self.clock() < host.leaves_at):
                continue
            host.told.add(cell.id)
            if cell.phase is Phase.STARTING:
                self.peers.kill(PeerKind.CELL, cell.id)
            else:
                self.peers.send(PeerKind.CELL, cell.id, msg.Shutdown("its host leaves"))


def _identity(host: Host) -> tuple[str, int, CellKind]:
    hello = host.link.hello
    return hello.host, hello.index, host.kind


def _named(cells: set[CellId] | tuple[CellId, ...]) -> str:
    return ", ".join(f"cell-{cell}" for cell in sorted(cells)) or "no cell"
