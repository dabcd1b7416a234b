"""The parts of a controller, made and wired to each other; `controller.py` is the loop that runs them.

Parts that need each other meet through hooks: what the table of cells, the table of executions and the batch ask of their
owner is answered here, each by one call to the part that does it. Nothing here waits, and nothing happens before `run`.
"""

from __future__ import annotations

import math
import time

from gyre_hpc.controller.cells.cell_rows import Cell, CellHooks
from gyre_hpc.controller.cells.cell_table import CellTable
from gyre_hpc.controller.context import RunContext
from gyre_hpc.controller.decisions import Decisions
from gyre_hpc.controller.driver import Driver
from gyre_hpc.controller.ending.departure import Departure
from gyre_hpc.controller.ending.leaving import Leaving
from gyre_hpc.controller.executions import queries
from gyre_hpc.controller.executions.executions import Execution, ExecutionHooks, ExecutionTable
from gyre_hpc.controller.guests import Guests
from gyre_hpc.controller.journal.entries import AnyEntry, Closed, Outcome, Sealed, StepTaken
from gyre_hpc.controller.journal.history import History
from gyre_hpc.controller.journal.snapshots import Snapshot, Snapshots
from gyre_hpc.controller.monitor.observer import Observer
from gyre_hpc.controller.outcomes import OutcomeKeeper
from gyre_hpc.controller.peers.adoption import Survivors
from gyre_hpc.controller.peers.channels import make_channels
from gyre_hpc.controller.peers.external import ExternalServices
from gyre_hpc.controller.peers.peers import Peers
from gyre_hpc.controller.peers.supervision import Supervision
from gyre_hpc.controller.processing import Processing
from gyre_hpc.controller.reception import Reception
from gyre_hpc.controller.steps import Steps
from gyre_hpc.controller.training.batches import BatchHooks, BatchRunner
from gyre_hpc.controller.training.weights import WeightKeeper
from gyre_hpc.records import CellId, GroupId, KvPolicy, Version
from gyre_hpc.schedule import protocol as p
from gyre_hpc.transport import messages as msg
from gyre_hpc.transport.messages import PeerKind


class Assembly:
    """All parts of one controller, for one run under one epoch."""

    def __init__(self, context: RunContext, peers: Peers, history: History) -> None:
        self.context, self.peers, self.history = context, peers, history
        self.config, self.journal = context.config, context.journal
        self.journal.appended = self._appended
        self.snapshots = Snapshots(self.journal, self._snapshot)
        self.started_at = history.started_at or time.time()
        self.observer = Observer(context.metrics, context.progress, lambda: time.time() - self.started_at)
        self.departure = self._make_departure()
        self._make_watch()
        self._make_machines()
        self._make_reception()

    def _make_departure(self) -> Departure:
        departure = Departure(self.config, self.context.layout, self.context.progress.note)
        past = self.history.forecasts.durations().values()
        departure.durations.add(second for seconds in past for second in seconds)
        return departure

    def _make_watch(self) -> None:
        """Who looks after the processes of this run, its own and others'."""
        cluster, layout, fault = self.config.cluster, self.context.layout, self.observer.fault
        patience_s = cluster.suspect_after_s + cluster.lost_after_s
        self.external: ExternalServices | None = None
        if cluster.runners == "external":
            self.external = ExternalServices(self.config, layout, self.peers, fault)
            patience_s = math.inf
        self.survivors = Survivors(self.peers, patience_s)
        self.supervision = Supervision(self.peers, cluster, layout.root, fault)

    def _make_machines(self) -> None:
        """The schedule and the state machines that carry it out."""
        self.driver = Driver(
            self.history.state,
            self.journal,
            lambda: self.steps.sync(),
            lambda decision: self.decisions.carry_out(decision),
            self._settled,
        )
        self.processing = Processing(self._send_processor, self.query)
        self.outcomes = OutcomeKeeper(
            self.config.schedule.oversample > 0,
            self.driver,
            self.journal,
            self.observer,
            self.departure.durations,
            self.history.evaluations,
            self.processing,
        )
        self.executions = ExecutionTable(self._execution_hooks())
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
            self.history,
            self.driver,
            self.executions,
            self.processing,
            self.cells,
            self.batches,
            self.steps,
            self.observer,
        )

    def _make_reception(self) -> None:
        """Who hears the peers, cells of other jobs among them."""
        context = self.context
        self.guests = Guests(
            self.config,
            self.context.layout,
            self.peers,
            self.cells,
            self.batches,
            self.journal,
            self.history,
            self.observer,
            over=lambda: self.decisions.stop_reason is not None,
        )
        self.channels = make_channels(
            self.config, context.layout, context.secret, context.epoch, self.peers, self.observer.fault
        )
        self.reception = Reception(
            self.config,
            self.peers,
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
            self.peers,
            self.reception.note,
            self.observer.fault,
        )

    # ---- hooks --------------------------------------------------------------------------------------------------

    def _appended(self, entry: AnyEntry) -> None:
        self.departure.progressed |= isinstance(entry, Outcome | StepTaken)
        self.history.note(entry)
        self.observer.heard(entry)

    def _execution_hooks(self) -> ExecutionHooks:
        config, secret = self.config, self.context.secret
        return ExecutionHooks(
            runner=lambda message: self.peers.send(PeerKind.RUNNER, 0, message),
            gateway=self._send_gateway,
            key=lambda id, attempt: queries.execution_key(secret, id, attempt),
            gateway_url=self._gateway_url,
            harness_seed=lambda id: queries.execution_seed(config.seed, id),
            opened=self.outcomes.opened,
            closed=lambda closed: self.journal.append(Closed(time.time(), closed)),
            launched=lambda id: self.feed(p.Launched((id,))),
            terminated=lambda id, reason: self.feed(p.Terminated(id, reason)),
            sealed=lambda sealed: self.journal.append(Sealed(time.time(), sealed)),
            outcome=self._execution_ended,
            permit=self.departure.permit,
        )

    def _cell_hooks(self) -> CellHooks:
        return CellHooks(
            cell=self._send_cell,
            gateway=self._send_gateway,
            feed=self.feed,
            moved=self.observer.moved,
            switched=self._cell_switched,
            clock=time.time,
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
            publications=lambda: self.history.publications,
            took=self.departure.checkpoint_took,
        )

    def _execution_ended(self, execution: Execution) -> None:
        if not self.outcomes.ended(execution):
            self.executions.forget(execution)

    def _gateway_url(self) -> str:
        """ "" while the gateway, or an external runner, is away: launches wait for both."""
        away = self.external is not None and not self.peers.all_here()
        return "" if away else self.peers.address(PeerKind.GATEWAY)

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

    # ---- small things -------------------------------------------------------------------------------------------

    def query(self, group: GroupId) -> str:
        """The query that a training group attempts."""
        return queries.training_query(self.config.tasks, self.config.seed, group)

    def _send_processor(self, message: msg.Message) -> None:
        self.peers.send(PeerKind.PROCESSOR, 0, message)

    def _send_cell(self, cell: CellId, message: msg.Message) -> None:
        self.peers.send(PeerKind.CELL, cell, message)

    def _send_gateway(self, message: msg.Message) -> None:
        self.peers.send(PeerKind.GATEWAY, 0, message)
