"""The controller: events in, decisions carried out, both journaled.

One queue brings everything peers do (`peers/`); `Driver` gives events to the schedule and journals each with its
decisions, which `decisions.py` carries out. Role switches (`cells/`), executions (`executions/`), optimizer steps
(`steps.py`, `training/`) and the processor's groups (`processing.py`) are message-driven state machines that
call back into `feed`. No step of them blocks. What a person sees is what `monitor/` tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time

from gyre_hpc.controller.cells.cell_rows import Cell, CellHooks
from gyre_hpc.controller.cells.cell_table import CellTable
from gyre_hpc.controller.context import RunContext
from gyre_hpc.controller.decisions import Decisions
from gyre_hpc.controller.driver import Driver
from gyre_hpc.controller.ending.departure import Departure
from gyre_hpc.controller.ending.ending import Ending
from gyre_hpc.controller.ending.leaving import Leaving
from gyre_hpc.controller.executions import queries, resume
from gyre_hpc.controller.executions.executions import Execution, ExecutionHooks, ExecutionTable
from gyre_hpc.controller.guests import Guests
from gyre_hpc.controller.journal.entries import (
    AnyEntry,
    AttemptOpened,
    Closed,
    Outcome,
    Resumed,
    Sealed,
    StepTaken,
)
from gyre_hpc.controller.journal.history import History
from gyre_hpc.controller.journal.snapshots import Snapshot, Snapshots
from gyre_hpc.controller.monitor.observer import Observer
from gyre_hpc.controller.peers.adoption import Holdings, Survivors
from gyre_hpc.controller.peers.channels import make_channels
from gyre_hpc.controller.peers.external import ExternalServices
from gyre_hpc.controller.peers.peers import Peers
from gyre_hpc.controller.peers.supervision import Supervision
from gyre_hpc.controller.processing import Processing
from gyre_hpc.controller.reception import SERVICES, Reception
from gyre_hpc.controller.steps import Steps
from gyre_hpc.controller.training.batches import BatchHooks, BatchRunner
from gyre_hpc.controller.training.weights import WeightKeeper
from gyre_hpc.errors import ScheduleStuck
from gyre_hpc.records import CellId, GroupId, KvPolicy, Version
from gyre_hpc.schedule import protocol as p
from gyre_hpc.schedule.state import GroupStatus
from gyre_hpc.transport import messages as msg
from gyre_hpc.transport.messages import PeerKind

log = logging.getLogger(__name__)
TICK_S = 0.25


class Controller:
    """One run under one epoch."""

    def __init__(self, context: RunContext, peers: Peers, history: History) -> None:
        self.context, self.peers, self.history = context, peers, history
        self.config, self.journal = context.config, context.journal
        self.journal.appended = self._appended
        self.snapshots = Snapshots(self.journal, self._snapshot)
        self.evaluations = history.evaluations
        self.started_at = history.started_at or time.time()
        self._ticked_at = time.monotonic()
        self.observer = Observer(context.metrics, context.progress, lambda: time.time() - self.started_at)
        self.departure = Departure(self.config, context.layout, context.progress.note)
        self.departure.durations.add(
            second for past in history.forecasts.durations().values() for second in past
        )
        self.external: ExternalServices | None = None
        patience_s = self.config.cluster.suspect_after_s + self.config.cluster.lost_after_s
        if self.config.cluster.runners == "external":
            self.external = ExternalServices(self.config, context.layout, peers, self.observer.fault)
            patience_s = math.inf
        self.survivors = Survivors(peers, patience_s)
        self.supervision = Supervision(peers, self.config.cluster, context.layout.root, self.observer.fault)
        self.driver = Driver(
            history.state,
            self.journal,
            lambda: self.steps.sync(),
            lambda decision: self.decisions.carry_out(decision),
            self._settled,
        )
        self.executions = ExecutionTable(self._execution_hooks())
        self.processing = Processing(lambda message: peers.send(PeerKind.PROCESSOR, 0, message), self._query)
        keeps_calls = KvPolicy(self.config.engine.kv_policy).keeps_calls
        self.cells = CellTable(self._cell_hooks(), self.config.gateway.drain_s, keeps_calls)
        self.batches = BatchRunner(self._batch_hooks())
        self.weights = self._weight_keeper()
        self.steps = Steps(
            self.config,
            self.driver,
            self.cells,
            self.batches,
            self.weights,
            self.processing,
            self.observer,
        )
        self.decisions = Decisions(
            self.config,
            history,
            self.driver,
            self.executions,
            self.processing,
            self.cells,
            self.batches,
            self.steps,
            self.observer,
        )
        self.guests = Guests(
            self.config,
            context.layout,
            peers,
            self.cells,
            self.batches,
            self.journal,
            history,
            self.observer,
            over=lambda: self.decisions.stop_reason is not None,
        )
        self.channels = make_channels(
            self.config, context.layout, context.secret, context.epoch, peers, self.observer.fault
        )
        self.reception = Reception(
            self.config,
            peers,
            self.driver,
            self.executions,
            self.cells,
            self.batches,
            self.weights,
            self.steps,
            self.processing,
            self.observer,
            self.supervision,
            self.guests,
            asked_to_end=self.departure.asked_to_end,
            channels=self.channels,
        )
        self.leaving = Leaving(
            lambda: self.driver.state,
            self.executions,
            self.batches,
            self.weights,
            peers.inbox,
            self.reception.note,
            self.observer.fault,
        )

    def _appended(self, entry: AnyEntry) -> None:
        self.departure.progressed |= isinstance(entry, Outcome | StepTaken)
        self.history.note(entry)

    def _execution_hooks(self) -> ExecutionHooks:
        config, secret = self.config, self.context.secret
        return ExecutionHooks(
            runner=lambda message: self.peers.send(PeerKind.RUNNER, 0, message),
            gateway=self._send_gateway,
            key=lambda id, attempt: queries.execution_key(secret, id, attempt),
            gateway_url=self._gateway_url,
            harness_seed=lambda id: queries.execution_seed(config.seed, id),
            opened=self._attempt_opened,
            closed=lambda closed: self.journal.append(Closed(time.time(), closed)),
            launched=lambda id: self.feed(p.Launched((id,))),
            terminated=lambda id, reason: self.feed(p.Terminated(id, reason)),
            sealed=lambda sealed: self.journal.append(Sealed(time.time(), sealed)),
            outcome=self._execution_outcome,
            permit=self.departure.permit,
        )

    def _cell_hooks(self) -> CellHooks:
        return CellHooks(
            cell=self._send_cell,
            gateway=self._send_gateway,
            feed=self.feed,
            moved=self.observer.moved,
            switched=self._cell_switched,
            clock=self.observer.now,
            step=self.journal.append,
            place=lambda cell: self.driver.state.place(cell),
        )

    def _cell_switched(self, cell: Cell, message: msg.CellSwitched) -> None:
        self.observer.switched(cell, message)
        if message.role is p.Role.TRAINING:
            self.batches.trainer_version[cell.id] = message.version

    def _batch_hooks(self) -> BatchHooks:
        return BatchHooks(
            send=self._send_cell,
            counts=self.feed,
            empty=lambda: self.feed(p.BatchDone(stepped=False)),
            joined=self.observer.joined,
        )

    def _weight_keeper(self) -> WeightKeeper:
        layout = self.context.layout
        return WeightKeeper(
            layout=layout,
            journal=self.journal,
            cells=self.cells,
            batches=self.batches,
            send=self._send_cell,
            published=lambda version: self.steps.version_served(version),
            checkpoint=self.history.checkpoint or (Version(0), layout.named(layout.model)),
            every=self.config.trainer.checkpoint_every,
            keep=self.config.trainer.keep_checkpoints,
            publications=self.history.publications,
            took=self.departure.checkpoint_took,
        )

    # ---- the loop -----------------------------------------------------------------------------------------------

    async def run(self) -> Ending | None:
        """Serve until all steps are done (None) or the run ends early (why). Raises the taxonomy's errors."""
        self.peers.start_accepting()
        try:
            await self.departure.learn()
            await self._launch_all()
            self._begin(await self._survivors_heard())
            for inbound in self.survivors.heard:
                self.reception.note(inbound)
            await self._serve()
            ending = None if self._ended() else self.departure.ending
            if ending is not None:
                await self.leaving.save(self.departure.time_to_save())
                await self.departure.leave_successor()
        finally:
            self.processing.send(msg.Seal())
            if self.decisions.stop_reason is not None:
                self.guests.dismiss(self.decisions.stop_reason or "done")
            if self.external is not None and (self._ended() or self.departure.ending is None):
                self.peers.end_external(self.decisions.stop_reason or "done")
                await self.external.end()
            if self.channels is not None:
                await self.channels.close()
            why = str(self.departure.ending or self.decisions.stop_reason or "done")
            await self.peers.shut_down(why, self.departure.shutdown_within_s())
            await self.weights.tidied()
            await self.snapshots.written()
            self.journal.close()
            self.observer.close()
        if self.decisions.stop_reason and ending is None:
            raise ScheduleStuck(
                self.decisions.stop_reason, fix=f"see {self.context.layout.logs(self.context.epoch)}"
            )
        return ending

    async def _launch_all(self) -> None:
        """All processes; no cells for a run whose last outcomes alone are missing."""
        if self.channels is not None:
            await self.channels.start()
        for kind in SERVICES:
            if kind not in self.peers.survivors:
                await self.peers.launch(kind, 0)
        if self.decisions.stop_reason is None:
            for index in range(self.config.cluster.cells):
                cell = CellId(index)
                what = self.driver.state.settings.kind_of(cell)
                self.cells.add(cell, self.config.engine.capacity, known=self.history.fresh, kind=what)
                await self.peers.launch_first(PeerKind.CELL, index)

    async def _survivors_heard(self) -> Holdings:
        """What outlived the controller before this one; what said nothing of itself is ended and replaced."""
        expected = set(self.peers.survivors)
        holdings = await self.survivors.gather(self._may_wait)
        if self.external is None:
            for kind in sorted(expected - self.peers.survivors):
                await self.peers.replace(kind)
        return holdings

    def _may_wait(self) -> bool:
        if self.external is not None:
            self.external.check()
        return self.departure.ending is None

    def _gateway_url(self) -> str:
        """ "" while the gateway, or an external runner, is away: launches wait for both."""
        away = self.external is not None and not self.peers.all_here()
        return "" if away else self.peers.address(PeerKind.GATEWAY)

    def _begin(self, holdings: Holdings = resume.NOTHING) -> None:
        self.observer.opened(self.config.transport.kind)
        if self.history.fresh:
            if self.config.tasks.heldout:
                self.steps.evaluate(Version(0))
            self.feed(p.Started())
            return
        self.journal.append(Resumed(time.time(), self.context.epoch))
        self._go_on(holdings)
        if not self.driver.state.started:
            self.feed(p.Started())

    def _go_on(self, holdings: Holdings) -> None:
        """Take up what an earlier controller left: none of its cells is left, its executions are."""
        history, pending = self.history, GroupStatus.PENDING
        self.feed(p.AllCellsLost())
        groups = self.driver.state.groups
        resume.register_executions(self.executions, history, self.config.tasks, self._query)
        self.processing.unsealed = resume.not_at_rest(self.context.layout, history)
        self.processing.awaited = {group.id for group in groups.values() if group.status is not pending}
        self.processing.tell_again(groups, history.outcomes)
        for id in (id for group in groups.values() for id in group.executions if id in history.outcomes):
            self._count_valid(history.outcomes[id])
        resume.go_on(self.executions, history, self.context.progress.note, holdings)
        history.forget_all_but(groups, self.processing.unsealed)
        self.decisions.forecast()
        self.steps.evaluate_if_awaited()

    async def _serve(self) -> None:
        while not self._ended() and not self.departure.due(self.leaving.idle):
            with contextlib.suppress(TimeoutError):
                self.reception.note(await asyncio.wait_for(self.peers.inbox.get(), TICK_S))
            for _ in range(self.peers.inbox.qsize()):  # what comes meanwhile waits: restarts must not
                self.reception.note(self.peers.inbox.get_nowait())
            if self.departure.ending is None and not self.departure.judging:
                await self.reception.restart_the_dead()
            if time.monotonic() - self._ticked_at >= TICK_S:
                self._tick()

    def _ended(self) -> bool:
        """The schedule has stopped; after the last step the outcomes still under way are waited for."""
        if self.decisions.stop_reason is None:
            return False
        return bool(self.decisions.stop_reason) or (self.reception.ready and not self.executions.unfinished())

    def _tick(self) -> None:
        self._ticked_at = time.monotonic()
        self.departure.tick()
        self.executions.launch_held()
        if self.executions.held and self.departure.ending is None and self.leaving.idle():
            self.departure.nothing_fits()
        self.peers.check_liveness()
        if self.external is not None:
            self.external.check()
        self.journal.sync_soon()
        self.cells.end_doubts(self._ticked_at)
        self.guests.tick()
        self.reception.restart_the_starved(self._ticked_at)
        publishing = self.weights.publishing is not None
        cells, state = self.cells.present, self.driver.state
        self.observer.sample(cells, self.batches, state, self.reception.running_calls, publishing)
        self.context.progress.tick(state, cells)

    # ---- the schedule -------------------------------------------------------------------------------------------

    def feed(self, event: p.AnyEvent) -> None:
        """Give an event to the schedule."""
        self.driver.feed(event)

    def _settled(self) -> None:
        self.leaving.heard_at = time.monotonic()
        self.processing.forget_all_but(self.driver.state.groups)
        if self.decisions.groups_ended:
            self._forget_ended_groups()
        self.observer.water(self.driver.state)

    def _forget_ended_groups(self) -> None:
        """What nobody can ask for again leaves every table; at the end of a burst a snapshot may be due."""
        groups, burst_ended = self.driver.state.groups, self.decisions.burst_ended
        self.decisions.groups_ended = self.decisions.burst_ended = False
        self.executions.forget_all_but(groups)
        self.history.forget_all_but(groups, self.processing.unsealed)
        if burst_ended:
            self.snapshots.burst_ended()

    def _snapshot(self) -> Snapshot:
        return self.history.snapshot(self.context.epoch, self.journal.end, self.driver.state)

    # ---- outcomes -----------------------------------------------------------------------------------------------

    def _attempt_opened(self, execution: Execution) -> None:
        self.journal.append(
            AttemptOpened(time.time(), execution.id, execution.attempt, execution.group, execution.query)
        )

    def _execution_outcome(self, execution: Execution) -> None:
        outcome = execution.outcome
        assert outcome is not None
        point = self.evaluations.of(execution.id) if execution.evaluation else None
        self.journal.append(Outcome(time.time(), outcome))
        self.observer.ended(execution)
        self.departure.durations.ended(outcome)
        self.processing.outcome(outcome)
        if execution.group is not None:
            self._count_valid(outcome)
        if point is not None and point.complete:
            self.observer.evaluated(point)
        if execution.group not in self.driver.state.groups:
            self.executions.forget(execution)

    def _count_valid(self, outcome: msg.ExecutionOutcome) -> None:
        """Oversampling goes by valid outcomes; a repeat changes nothing."""
        if self.config.schedule.oversample:
            assessment = outcome.assessment
            self.feed(p.Outcome(outcome.execution, assessment is not None and assessment.valid))

    # ---- small things -------------------------------------------------------------------------------------------

    def _query(self, group: GroupId) -> str:
        return queries.training_query(self.config.tasks, self.config.seed, group)

    def _send_cell(self, cell: CellId, message: msg.Message) -> None:
        self.peers.send(PeerKind.CELL, cell, message)

    def _send_gateway(self, message: msg.Message) -> None:
        self.peers.send(PeerKind.GATEWAY, 0, message)
