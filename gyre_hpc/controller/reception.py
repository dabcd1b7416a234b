"""What peers say and do, each handed to the state machine that it concerns.

The controller's loop calls `note` for everything on its inbox, one at a time and in order, then `restart_the_dead`. A
message that its sender cannot have meant (Contradiction) costs that sender, named, never the run: its process is ended,
nothing more of it is heard, its claims return, it is restarted. Late messages are for the state machines to know.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gyre_hpc.config import RunConfig
from gyre_hpc.controller.cells.cell_table import CellTable
from gyre_hpc.controller.cells.phases import Phase
from gyre_hpc.controller.driver import Driver
from gyre_hpc.controller.executions.executions import ExecutionTable
from gyre_hpc.controller.guests import Guests
from gyre_hpc.controller.monitor.observer import Observer
from gyre_hpc.controller.peers.channels import ABOUT_CHANNELS, Channels
from gyre_hpc.controller.peers.inbound import (
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
from gyre_hpc.controller.peers.peers import Peers
from gyre_hpc.controller.peers.supervision import Supervision
from gyre_hpc.controller.processing import Processing
from gyre_hpc.controller.steps import WORK_S, Steps
from gyre_hpc.controller.training.batches import BatchRunner
from gyre_hpc.controller.training.claims import Contradiction
from gyre_hpc.controller.training.weights import WeightKeeper
from gyre_hpc.records import CellId
from gyre_hpc.schedule import protocol as p
from gyre_hpc.schedule.state import GroupStatus
from gyre_hpc.transport import messages as msg
from gyre_hpc.transport.messages import PeerKind

log = logging.getLogger(__name__)
STARVES = 2
"""A cell that cannot pull weights waits so many times as long as the death of their owner takes to be noticed."""
SERVICES = (PeerKind.GATEWAY, PeerKind.PROCESSOR, PeerKind.RUNNER)


@dataclass
class Reception:
    """The state machines of one controller, seen from its peers. `services` are the kinds that have come up."""

    config: RunConfig
    peers: Peers
    driver: Driver
    executions: ExecutionTable
    cells: CellTable
    batches: BatchRunner
    weights: WeightKeeper
    steps: Steps
    processing: Processing
    observer: Observer
    supervision: Supervision
    guests: Guests
    asked_to_end: Callable[[str], None] = lambda peer: None
    """Called when SIGTERM reached a peer that nobody of us has told to end."""
    channels: Channels | None = None
    services: set[PeerKind] = field(default_factory=set)
    running_calls: dict[int, int] = field(default_factory=dict)
    """Model calls per cell, as the gateway said last."""
    disowned: set[PeerId] = field(default_factory=set)
    """Peers that contradicted themselves and have not ended yet."""

    def note(self, inbound: Inbound) -> None:
        """Something a peer said or did."""
        match inbound:
            case Said(peer=peer, message=msg.Goodbye(error=error)):
                if error:
                    self.supervision.said_goodbye(peer, error)
            case Said(peer=(PeerKind.CELL, index), message=msg.AskedToEnd()) if self.guests.has(
                CellId(index)
            ):
                self.guests.asked_to_end(CellId(index))
            case Said(peer=peer, message=msg.AskedToEnd()):
                self.asked_to_end(_name(peer))
            case Said(peer=peer, message=message):
                self._said(peer, message)
            case Connected(peer=(PeerKind.CELL, index)):
                self._cell_connected(CellId(index))
            case Connected(peer=(kind, _), again=again):
                self._service_connected(kind, again)
            case Replaced(peer=(kind, _)):
                self.observer.fault(str(kind), "another process has come in its place")
                if kind is PeerKind.RUNNER:
                    self.executions.runner_lost()
            case Exited(peer=peer, code=code):
                self._exited(peer, code)
            case Suspected(peer=(PeerKind.CELL, index), recovered=recovered):
                self._cell_suspected(CellId(index), recovered)
            case Suspected(peer=(kind, index), recovered=recovered):
                where = self.supervision.where((kind, index))
                log.warning("%s%s %s", kind, where, "is alive again" if recovered else "is silent")
            case HostSaid(link=link, message=said):
                self.guests.said(link, said)
            case Told(who=who, what=what):
                self.observer.fault(who, what)

    def _said(self, peer: PeerId, message: msg.Message) -> None:
        kind, index = peer
        if peer in self.disowned:
            log.info("%s-%d: %s dropped, it is being ended", kind, index, type(message).__name__)
            return
        try:
            if self.channels is not None and isinstance(message, ABOUT_CHANNELS):
                self.channels.said(peer, message)
            elif kind is PeerKind.CELL:
                self._from_cell(CellId(index), message)
            else:
                self._from_service(kind, message)
        except Contradiction as error:
            self.observer.fault(_name(peer), f"{error}; it is restarted")
            self.disowned.add(peer)
            self.peers.kill(kind, index)

    def _from_cell(self, cell: CellId, message: msg.Message) -> None:
        match message:
            case msg.Claim(batch=batch):
                self.batches.claim(cell, batch)
            case msg.MicroStepDone():
                self.steps.micro_step_done(cell, message)
            case msg.MicroStepUnavailable():
                self.steps.micro_step_unavailable(cell, message, self.executions.outcomes())
            case msg.Contribution():
                self.steps.contribution(cell, message)
            case msg.BatchCommitted():
                self.steps.committed(cell, message)
            case msg.CommitFailed(batch=batch, cell=lost, reason=reason):
                self.observer.fault(f"cell-{lost}", f"its contribution could not be pulled: {reason}")
                self.batches.commit_failed(lost, batch)
            case msg.WeightsPublished():
                self.weights.weights_published(message)
                self.steps.sync()
            case msg.TrainerRestored():
                self.steps.trainer_restored(cell, message, ready=self.ready)
            case msg.StepDone():
                self.cells.step_done(message)
            case msg.CellSwitched():
                self._cell_switched(cell, message)
            case msg.EngineDown(cause=cause):
                self.observer.fault(f"cell-{cell}", f"engine down: {cause}")
                self.cells.engine_died(cell, cause)
            case msg.SwitchPostponed(reason=reason):
                self.observer.fault(f"cell-{cell}", f"waits for other weights: {reason}")
                cluster = self.config.cluster
                patience = STARVES * (cluster.suspect_after_s + cluster.lost_after_s)
                self.cells.postponed(cell, message, time.monotonic() + patience)
            case msg.StartPostponed(batch=batch, reason=reason):
                self.observer.fault(f"cell-{cell}", f"waits for another snapshot: {reason}")
                self.batches.postponed(cell, batch)
            case msg.SwitchFailed(state=state, error=error):
                self.cells.failed(cell, message)
                self.observer.fault(f"cell-{cell}", f"{state}: {error}; the cell is restarted")
                self.peers.kill(PeerKind.CELL, cell)
            case _:
                raise Contradiction(f"cell {cell} sent {type(message).__name__}")

    def _cell_switched(self, cell: CellId, message: msg.CellSwitched) -> None:
        self.cells.switched(cell, message)
        self.steps.sync()
        self.weights.finish_publication()

    def _cell_connected(self, cell: CellId) -> None:
        if self.channels is not None:
            self.channels.connected((PeerKind.CELL, cell))
        self.cells.hello(cell)
        self._restore_somewhere()

    def _restore_somewhere(self) -> None:
        """The first cell that is not lost restores the checkpoint, once it is there, unless another holds it."""
        live = [
            cell
            for cell in self.cells.cells.values()
            if cell.phase is not Phase.LOST and not self.guests.has(cell.id)
        ]
        first = min(live, key=lambda cell: cell.id, default=None)
        if first is not None and first.phase in (Phase.IDLE, Phase.LOADING) and not self._restoring():
            self.weights.restore(first.id)

    def _restoring(self) -> bool:
        return self.weights.restored is not None or self.weights.restoring is not None

    def _cell_suspected(self, cell: CellId, recovered: bool) -> None:
        if recovered:
            self.cells.engine_answers(cell)
        else:
            where = self.supervision.where((PeerKind.CELL, cell))
            self.observer.fault(f"cell-{cell}", f"no heartbeat{where}: its calls move on")
            self.cells.engine_down(cell, "no heartbeat")

    def _from_service(self, kind: PeerKind, message: msg.Message) -> None:
        match message:
            case msg.ExecutionStarted():
                self.executions.started(message)
            case msg.ExecutionClosed():
                self.executions.closed(message)
            case msg.ExecutionInterrupted():
                self.executions.interrupted(message)
            case msg.ExecutionAssessed():
                self.executions.assessed(message)
            case msg.ExecutionSealed():
                self.executions.gateway_sealed(message)
            case msg.Holding(attempts=attempts):
                log.info("the %s holds %d attempts", kind, len(attempts))
            case msg.HeldBack():
                self.peers.send(PeerKind.RUNNER, 0, message)
            case msg.StepDone():
                self.cells.step_done(message)
            case msg.Unrouted(cell=cell):
                state = self.driver.state
                batch = state.open_batch.index if state.open_batch is not None else 0
                core = cell == state.core
                self.cells.unrouted(message, core, batch, self.batches.snapshot, state.core_version)
            case msg.EngineFault(cell=cell, cause=cause):
                self.observer.fault(f"cell-{cell}", f"the gateway could not use its engine: {cause}")
                until = time.monotonic() + self.config.cluster.suspect_after_s / 4
                if not self.cells.doubt_engine(message, until):
                    self.peers.kill(PeerKind.CELL, cell)
            case msg.GatewayStatus(running=running):
                self.running_calls = running
            case msg.GroupProcessed():
                self._group_processed(message)
            case msg.ShardSealed(shard=shard, executions=ids):
                log.info("%s sealed with %d executions", shard, len(ids))
                self.processing.sealed(ids)
            case _:
                raise Contradiction(f"the {kind} sent {type(message).__name__}")

    def _group_processed(self, message: msg.GroupProcessed) -> None:
        group = self.driver.state.groups.get(message.group)
        if group is None:
            self.processing.send(msg.DropGroup(message.group))
            return
        self.processing.take(message)
        self.batches.published_again(message.micro_steps)
        self.steps.offer_weights(ready=self.ready)
        if group.status is not GroupStatus.PENDING:
            return
        if message.valid >= 2:
            self.driver.feed(p.GroupReady(message.group, len(message.micro_steps)))
        else:
            self.driver.feed(p.GroupDead(message.group, message.reason))

    def _service_connected(self, kind: PeerKind, again: bool) -> None:
        returned = kind in self.services
        self.services.add(kind)
        if kind is PeerKind.GATEWAY:
            self._gateway_connected(returned, again)
        elif kind is PeerKind.RUNNER:
            self.disowned.discard((kind, 0))
            if again:
                self.executions.runner_returned()
            self.executions.gateway_up()
        self.steps.offer_weights(ready=self.ready)

    def _gateway_connected(self, returned: bool, again: bool) -> None:
        if returned:
            self.cells.gateway_returned()
        if returned and again:
            self.executions.gateway_returned()
        elif returned:
            self.executions.gateway_lost()
        self.executions.gateway_up()

    @property
    def ready(self) -> bool:
        """Whether every service has come up."""
        return set(SERVICES) <= self.services

    def _exited(self, peer: PeerId, code: int) -> None:
        kind, index = peer
        asked = peer in self.disowned
        self.disowned.discard(peer)
        if self.channels is not None:
            self.channels.exited(peer)
        guest = kind is PeerKind.CELL and self.guests.has(CellId(index))
        why = self.supervision.exited(peer, code, asked=asked, guest=guest)
        if not guest:
            self.observer.fault(_name(peer), why)
        if kind is PeerKind.CELL:
            cell = CellId(index)
            self.steps.cell_lost(cell)
            self.cells.lost(cell)
            self.weights.finish_publication()
            self._restore_somewhere()
        if guest:
            self.guests.exited(cell, code, why)

    def restart_the_starved(self, now: float) -> None:
        """Cells that cannot pull weights from a core that lives."""
        state = self.driver.state
        if state.core is None or state.restoring or self.weights.restoring is not None:
            return
        for cell in self.cells.starved(now):
            self.observer.fault(f"cell-{cell}", "cannot pull weights from a core that lives; it is restarted")
            self.peers.kill(PeerKind.CELL, cell)

    def restart_the_overdue(self, now: float) -> None:
        """Cells whose trainer hangs; what they were at is done by others."""
        for cell, what in self.steps.overdue(now):
            self.observer.fault(f"cell-{cell}", f"{what} is not done after {WORK_S:g} s; it is restarted")
            self.peers.kill(PeerKind.CELL, cell)

    async def restart_the_dead(self) -> None:
        """Relaunch them and tell them, or what depended on them, where things stand."""
        for peer in await self.supervision.relaunch_the_dead():
            if peer.kind is PeerKind.CELL:
                self.cells.restarted(CellId(peer.index))
            elif peer.kind is PeerKind.RUNNER:
                self.executions.runner_lost()
            elif peer.kind is PeerKind.PROCESSOR:
                self.processing.tell_again(self.driver.state.groups, self.executions.outcomes())
        await self.guests.launch_the_awaited()


def _name(peer: PeerId) -> str:
    kind, index = peer
    return f"cell-{index}" if kind is PeerKind.CELL else str(kind)
