"""The controller: events in, decisions carried out, both journaled.

One queue brings everything peers do (`peers.py`); one function, `feed`, gives events to the schedule, journals each
with its decisions and carries the decisions out. Role switches (`cell_table.py`), executions (`executions.py`),
training batches (`batches.py`) and the core's weights (`weights.py`) are message-driven state machines that call back
into `feed`. No step of them blocks. What a person sees is `observer.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from dataclasses import dataclass

from gyre_hpc.config import RunConfig
from gyre_hpc.controller import queries
from gyre_hpc.controller.batches import BatchHooks, BatchRunner
from gyre_hpc.controller.cell_table import CellHooks, CellTable, Phase
from gyre_hpc.controller.executions import Execution, ExecutionHooks, ExecutionTable
from gyre_hpc.controller.history import History
from gyre_hpc.controller.journal import AttemptOpened, Happened, Journal, Outcome, Resumed, Sealed, StepTaken
from gyre_hpc.controller.observer import Observer
from gyre_hpc.controller.peers import Connected, Exited, Inbound, Peers, Said, Suspected
from gyre_hpc.controller.progress import Progress
from gyre_hpc.controller.weights import WeightKeeper
from gyre_hpc.errors import MissingInput, PeerLost, ProtocolViolation, ScheduleStuck
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CellId, ClosingReason, ExecutionId, GroupId, Version
from gyre_hpc.report.metrics import MetricsWriter
from gyre_hpc.schedule import protocol as p
from gyre_hpc.schedule.machine import decide
from gyre_hpc.schedule.state import Group, GroupStatus
from gyre_hpc.training.metrics import merge, summarise
from gyre_hpc.transport import messages as msg
from gyre_hpc.transport.messages import PeerKind

log = logging.getLogger(__name__)
TICK_S = 0.25
SHUTDOWN_GRACE_S = 20.0
CHECKPOINT_GRACE_S = 30.0
SERVICES = (PeerKind.GATEWAY, PeerKind.PROCESSOR, PeerKind.RUNNER)


@dataclass(frozen=True)
class RunContext:
    """What a controller is given: the run's configuration, folder, secret, epoch and open files."""

    config: RunConfig
    layout: RunLayout
    secret: bytes
    epoch: int
    journal: Journal
    metrics: MetricsWriter
    progress: Progress


class Controller:
    """One run under one epoch."""

    def __init__(self, context: RunContext, peers: Peers, history: History) -> None:
        self.context, self.peers, self.history = context, peers, history
        self.config, self.journal = context.config, context.journal
        self.state = history.state
        self.evaluations = history.evaluations
        self.started_at = history.started_at or time.time()
        self._events: deque[p.AnyEvent] = deque()
        self._draining = False
        self._services: set[PeerKind] = set()
        self._reprocess: set[GroupId] = set()
        self._processed: dict[GroupId, msg.GroupProcessed] = {}
        self._returning: set[CellId] = set()
        self._waiting_for_gateway: list[ExecutionId] = []
        self._sums: dict[str, dict[str, float]] = {}
        self._doubted: dict[CellId, float] = {}
        self._restarts = 0
        self._stop_reason: str | None = None
        self._interrupted = ""
        self._last_words = ""
        self._running_calls: dict[int, int] = {}
        self._ticked_at = time.monotonic()
        self.observer = Observer(context.metrics, context.progress, lambda: time.time() - self.started_at)
        cell_hooks = CellHooks(
            cell=self._send_cell,
            gateway=self._send_gateway,
            feed=self.feed,
            moved=self.observer.moved,
            clock=self.observer.now,
        )
        self.cells = CellTable(cell_hooks, self.config.gateway.drain_s)
        self.batches = BatchRunner(
            BatchHooks(
                send=self._send_cell,
                counts=lambda unclaimed, open: self.feed(p.MicroSteps(unclaimed, open)),
                empty=lambda: self.feed(p.BatchDone(stepped=False)),
                joined=self.observer.joined,
            )
        )
        self.weights = WeightKeeper(
            layout=context.layout,
            journal=self.journal,
            cells=self.cells,
            batches=self.batches,
            send=self._send_cell,
            published=self._version_served,
            checkpoint=history.checkpoint or (Version(0), str(context.layout.model)),
            every=self.config.trainer.checkpoint_every,
            keep=self.config.trainer.keep_checkpoints,
            publications=history.publications,
        )
        self.executions = ExecutionTable(self._execution_hooks())

    def _execution_hooks(self) -> ExecutionHooks:
        config, secret = self.config, self.context.secret
        return ExecutionHooks(
            runner=lambda message: self.peers.send(PeerKind.RUNNER, 0, message),
            gateway=self._send_gateway,
            key=lambda id, attempt: queries.execution_key(secret, id, attempt),
            base_url=lambda key: f"{self.peers.address(PeerKind.GATEWAY)}/x/{key}",
            harness_seed=lambda id: queries.execution_seed(config.seed, id),
            opened=self._attempt_opened,
            launched=lambda id: self.feed(p.Launched((id,))),
            terminated=lambda id, reason: self.feed(p.Terminated(id, reason)),
            sealed=lambda sealed: self.journal.append(Sealed(time.time(), sealed)),
            outcome=self._execution_outcome,
        )

    def interrupt(self, reason: str) -> None:
        """Ctrl-C or SIGTERM: end cleanly at the next turn of the loop."""
        self._interrupted = self._interrupted or reason

    # ---- the loop -----------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Serve until all steps are done ("") or someone interrupts (the reason). Raises ScheduleStuck, PeerLost."""
        self.peers.start_accepting()
        for kind in SERVICES:
            await self.peers.launch(kind, 0)
        for index in range(self.config.cluster.cells):
            self.cells.add(CellId(index), self.config.engine.capacity, known=self.history.fresh)
            await self.peers.launch(PeerKind.CELL, index)
        try:
            self._begin()
            await self._serve()
            if self._interrupted:
                await self._save_before_leaving()
        finally:
            self.peers.send(PeerKind.PROCESSOR, 0, msg.Seal())
            await self.peers.shut_down(self._interrupted or self._stop_reason or "done", SHUTDOWN_GRACE_S)
            self.journal.close()
            self.observer.close()
        if self._stop_reason and not self._interrupted:
            raise ScheduleStuck(self._stop_reason, fix=self._where())
        return self._interrupted

    async def _serve(self) -> None:
        while not self._interrupted and not self._ended():
            with contextlib.suppress(TimeoutError):
                self._note(await asyncio.wait_for(self.peers.inbox.get(), TICK_S))
            while not self.peers.inbox.empty():
                self._note(self.peers.inbox.get_nowait())
            await self._restart_the_dead()
            if time.monotonic() - self._ticked_at >= TICK_S:
                self._tick()

    def _ended(self) -> bool:
        """The schedule has stopped; after the last step the outcomes still under way are waited for."""
        if self._stop_reason is None:
            return False
        return bool(self._stop_reason) or not self.executions.unfinished()

    def _begin(self) -> None:
        if self.history.fresh:
            if self.config.tasks.heldout:
                self._evaluate(Version(0))
            self.feed(p.Started())
            return
        self.journal.append(Resumed(time.time(), self.context.epoch))
        self._adopt_history()
        for cell in reversed(self.state.cells):
            self.feed(p.CellLost(cell.id))

    def _tick(self) -> None:
        self._ticked_at = time.monotonic()
        self.peers.check_liveness()
        self.journal.sync()
        for cell, until in list(self._doubted.items()):
            if self._ticked_at > until:
                del self._doubted[cell]
                self.cells.engine_answers(cell)
        publishing = self.weights.publishing is not None
        cells = list(self.cells.cells.values())
        self.observer.sample(cells, self.batches, self.state, self._running_calls, publishing)
        self.context.progress.tick(self.state, cells)

    # ---- the schedule -------------------------------------------------------------------------------------------

    def feed(self, event: p.AnyEvent) -> None:
        """Give an event to the schedule. Events raised while decisions are carried out wait their turn."""
        self._events.append(event)
        if self._draining:
            return
        self._draining = True
        try:
            while self._events:
                self._decide(self._events.popleft())
        finally:
            self._draining = False

    def _decide(self, event: p.AnyEvent) -> None:
        self.state, decisions = decide(self.state, event)
        self.journal.append(Happened(time.time(), event, tuple(decisions)))
        self._sync_batch()
        for decision in decisions:
            self._carry_out(decision)
        self._forget_groups()
        self.observer.water(self.state)

    def _carry_out(self, decision: p.AnyDecision) -> None:
        match decision:
            case p.Dispatch(groups=groups, version=version):
                for group in groups:
                    self._dispatch(group, version)
            case p.Launch(ids=ids):
                for id in ids:
                    self._launch(id)
            case p.LaunchEvaluation(ids=ids, version=version):
                for id in ids:
                    position = self.evaluations.launched(id, version)
                    self.executions.register(id, None, queries.heldout_query(self.config.tasks, position))
                    self._launch(id)
            case p.Withdraw(ids=ids):
                for id in ids:
                    self.executions.withdraw(id)
            case p.ToTraining(cell=cell):
                self.cells.to_training(cell)
            case p.ToRollout(cell=cell):
                self._to_rollout(cell)
            case p.CloseBatch():
                self.batches.close()
            case p.Publish(version=version):
                self._publish(version)
            case p.WriteOff(group=group, reason=reason):
                self.observer.fault(f"group {group}", f"written off: {reason}")
            case p.EndBurst(version=end):
                self.observer.burst_ended(self.state.burst.index, end)
            case p.RestoreCore(cell=cell):
                self._restore_core(cell)
            case p.Stop(reason=reason):
                self._stop_reason = reason
            case p.CloseJoinWindow():
                log.debug("join window closed")

    def _dispatch(self, group: p.DispatchedGroup, version: Version) -> None:
        query = self._query(group.group)
        for id in group.executions:
            self.executions.register(id, group.group, query)
        expect = msg.ExpectGroup(group.group, query, version, group.executions)
        self.peers.send(PeerKind.PROCESSOR, 0, expect)

    def _launch(self, id: ExecutionId) -> None:
        """A harness needs the gateway's address: while there is none, the launch waits."""
        if self.peers.address(PeerKind.GATEWAY):
            self.executions.launch(id)
        else:
            self._waiting_for_gateway.append(id)

    def _forget_groups(self) -> None:
        """Groups that nothing can call for again."""
        for group in [group for group in self._processed if group not in self.state.groups]:
            del self._processed[group]
            self.peers.send(PeerKind.PROCESSOR, 0, msg.DropGroup(group))

    # ---- training -----------------------------------------------------------------------------------------------

    def _sync_batch(self) -> None:
        """Bring the claims ledger in line with the schedule's open batch."""
        batch, core = self.state.open_batch, self.state.core
        if batch is None or core is None or self.batches.finished(batch.index):
            return
        if self.batches.ledger is None or self.batches.ledger.batch != batch.index:
            self.batches.open(batch.index, core, self.state.version)
            self.observer.batch_opened()
        for group in batch.groups:
            processed = self._processed.get(group)
            if processed is not None:
                self.batches.add_group(group, processed.micro_steps, processed.valid)
        if batch.window_open:
            for cell in self.state.trainers:
                if self.cells.cells[cell].phase is Phase.TRAINING:
                    self.batches.enrol(cell)

    def _to_rollout(self, cell: CellId) -> None:
        if self.batches.flush_leaver(cell):
            self._returning.add(cell)
        else:
            self.cells.to_rollout(cell)

    def _publish(self, version: Version) -> None:
        assert self.state.core is not None
        last = self.state.steps_done >= self.config.schedule.steps
        self.weights.publish(self.state.core, version, last=last)

    def _batch_committed(self, message: msg.BatchCommitted) -> None:
        ledger, batch, core = self.batches.ledger, self.state.open_batch, self.state.core
        if ledger is None or batch is None or core is None or ledger.batch != message.batch:
            return
        sums = merge(self._sums[name] for _, names in ledger.owners() for name in names)
        metrics = {**message.metrics, **summarise(sums)}
        self._sums.clear()
        groups = [self._processed[group] for group in batch.groups]
        staleness = tuple(self.state.staleness(self.state.groups[group]) for group in batch.groups)
        self.journal.append(
            StepTaken(
                at=time.time(),
                batch=message.batch,
                version=message.version,
                executions=self.batches.executions,
                owners=ledger.owners(),
                metrics=metrics,
                staleness=staleness,
                tokens_trained=sum(group.trained_tokens for group in groups),
            )
        )
        self.observer.step(message.version, metrics, groups, staleness, self.batches)
        self.batches.trainer_version[core] = message.version
        self.batches.release()
        self.feed(p.BatchDone(stepped=True))
        if self.state.open_batch is not None:
            self.weights.expose(core, message.version)

    def _version_served(self, version: Version) -> None:
        """Every live engine serves `version`."""
        tasks, done = self.config.tasks, self.state.steps_done >= self.config.schedule.steps
        every = tasks.evaluate_every
        self.feed(p.Published(version))
        if tasks.heldout and (done or (every and self.weights.publications % every == 0)):
            self._evaluate(version)

    def _evaluate(self, version: Version) -> None:
        size = queries.evaluation_size(self.config.tasks)
        self.evaluations.due(version, size)
        self.feed(p.EvaluationDue(version, size))

    def _restore_core(self, cell: CellId) -> None:
        self.batches.release()
        restored = self.weights.restored
        if restored is not None and restored[0] == cell:
            self.feed(p.CoreRestored(restored[1].version))
        elif self.weights.restoring != cell:
            self.weights.restore(cell)

    def _trainer_restored(self, cell: CellId, message: msg.TrainerRestored) -> None:
        self.weights.trainer_restored(cell, message)
        if self.state.restoring and self.state.core == cell:
            self.feed(p.CoreRestored(message.version))
        if self.cells.weights is not None:
            self.cells.weights_available(message.weights)
        self._offer_weights()

    def _offer_weights(self) -> None:
        """Engines load once weights exist, all services are up and what a resume waits for has been processed."""
        available = self.weights.available
        ready = set(SERVICES) <= self._services and not self._reprocess
        if ready and available is not None and self.cells.weights is None:
            self.cells.weights_available(available)

    # ---- peers --------------------------------------------------------------------------------------------------

    def _note(self, inbound: Inbound) -> None:
        match inbound:
            case Said(peer=(PeerKind.CELL, index), message=message):
                self._from_cell(CellId(index), message)
            case Said(message=message):
                self._from_service(message)
            case Connected(peer=(PeerKind.CELL, index)):
                self._cell_connected(CellId(index))
            case Connected(peer=(kind, _), again=again):
                self._service_connected(kind, again)
            case Exited(peer=(PeerKind.CELL, index), code=code):
                self._cell_exited(CellId(index), code)
            case Exited(peer=(kind, _), code=code):
                self._service_exited(kind, code)
            case Suspected(peer=(PeerKind.CELL, index), recovered=recovered):
                self._cell_suspected(CellId(index), recovered)
            case Suspected(peer=(kind, _), recovered=recovered):
                log.warning("%s %s", kind, "is alive again" if recovered else "is silent")

    def _from_cell(self, cell: CellId, message: msg.Message) -> None:
        match message:
            case msg.Claim(batch=batch):
                self.batches.claim(cell, batch)
            case msg.MicroStepDone(batch=batch, micro_step=name, metrics=sums):
                if self.batches.done(cell, batch, name):
                    self._sums[name] = sums
            case msg.Contribution():
                self.batches.contribution(cell, message)
                if cell in self._returning:
                    self._returning.discard(cell)
                    self.cells.to_rollout(cell)
            case msg.BatchCommitted():
                self._batch_committed(message)
            case msg.CommitFailed(cell=lost, reason=reason):
                self.observer.fault(f"cell-{lost}", f"its contribution could not be pulled: {reason}")
                self.batches.commit_failed(lost)
            case msg.WeightsPublished():
                self.weights.weights_published(message)
                self._sync_batch()
            case msg.TrainerRestored():
                self._trainer_restored(cell, message)
            case msg.CellSwitched():
                self._cell_switched(cell, message)
            case msg.EngineDown(cause=cause):
                self.observer.fault(f"cell-{cell}", f"engine down: {cause}")
                self._doubted.pop(cell, None)
                self.cells.engine_down(cell, cause)
            case msg.SwitchFailed(state=state, error=error):
                self.observer.fault(f"cell-{cell}", f"{state}: {error}; the cell is restarted")
                self.peers.kill(PeerKind.CELL, cell)
            case msg.Goodbye(error=error):
                self._said_goodbye(f"cell-{cell}", error)
            case _:
                raise ProtocolViolation(f"cell {cell} sent {type(message).__name__}")

    def _cell_switched(self, cell: CellId, message: msg.CellSwitched) -> None:
        self.observer.switched(self.cells.cells[cell], message)
        if message.role is p.Role.TRAINING:
            self.batches.trainer_version[cell] = message.version
        self.cells.switched(cell, message)
        self._sync_batch()
        self.weights.finish_publication()

    def _cell_connected(self, cell: CellId) -> None:
        self.cells.hello(cell)
        nobody = self.weights.restored is None and self.weights.restoring is None
        if nobody and cell == min(self.cells.cells):
            self.weights.restore(cell)

    def _cell_exited(self, cell: CellId, code: int) -> None:
        self.observer.fault(f"cell-{cell}", f"exited with {code}")
        core = cell == self.state.core
        if core:
            self.batches.release()
        else:
            self.batches.cell_lost(cell)
        self._returning.discard(cell)
        self._doubted.pop(cell, None)
        self.weights.cell_lost(cell, core)
        self.cells.lost(cell)
        self.weights.finish_publication()

    def _cell_suspected(self, cell: CellId, recovered: bool) -> None:
        if recovered:
            self.cells.engine_answers(cell)
        else:
            self.observer.fault(f"cell-{cell}", "no heartbeat: its calls move on")
            self.cells.engine_down(cell, "no heartbeat")

    def _from_service(self, message: msg.Message) -> None:
        match message:
            case msg.ExecutionStarted():
                self.executions.started(message)
            case msg.ExecutionClosed():
                self.executions.closed(message)
            case msg.ExecutionAssessed():
                self.executions.assessed(message)
            case msg.ExecutionSealed():
                self.executions.gateway_sealed(message)
            case msg.Unrouted(cell=cell):
                batch = self.state.open_batch.index if self.state.open_batch is not None else 0
                core = cell == self.state.core
                self.cells.unrouted(cell, core, batch, self.batches.snapshot, self.state.version)
            case msg.EngineFault(cell=cell, cause=cause):
                self._engine_fault(cell, cause)
            case msg.GatewayStatus(running=running):
                self._running_calls = running
            case msg.GroupProcessed():
                self._group_processed(message)
            case msg.ShardSealed(shard=shard, executions=ids):
                log.info("%s sealed with %d executions", shard, len(ids))
            case msg.Goodbye(error=error):
                self._said_goodbye("a service", error)
            case _:
                raise ProtocolViolation(f"a service sent {type(message).__name__}")

    def _engine_fault(self, cell: CellId, cause: str) -> None:
        """The gateway could not use the engine: its leader says EngineDown if it died, else it is routed again."""
        self.observer.fault(f"cell-{cell}", f"the gateway could not reach its engine: {cause}")
        self.cells.engine_down(cell, cause)
        self._doubted[cell] = time.monotonic() + self.config.cluster.suspect_after_s / 4

    def _group_processed(self, message: msg.GroupProcessed) -> None:
        group = self.state.groups.get(message.group)
        if group is None:
            self.peers.send(PeerKind.PROCESSOR, 0, msg.DropGroup(message.group))
            return
        self._processed[message.group] = message
        if self.batches.ledger is not None:
            self.batches.ledger.replace_refs(message.micro_steps)
        if message.group in self._reprocess:
            self._reprocess.discard(message.group)
            self._offer_weights()
        if group.status is not GroupStatus.PENDING:
            return
        if message.valid >= 2:
            self.feed(p.GroupReady(message.group, len(message.micro_steps)))
        else:
            self.feed(p.GroupDead(message.group, message.reason))

    def _service_connected(self, kind: PeerKind, again: bool) -> None:
        returned = kind in self._services
        self._services.add(kind)
        if kind is PeerKind.GATEWAY and returned:
            self.cells.gateway_returned()
            if again:
                self.executions.gateway_returned()
            else:
                self.executions.gateway_lost()
        if kind is PeerKind.GATEWAY:
            waiting, self._waiting_for_gateway = self._waiting_for_gateway, []
            for id in waiting:
                self.executions.launch(id)
        self._offer_weights()

    def _said_goodbye(self, who: str, error: str) -> None:
        if error:
            self.observer.fault(who, error)
            self._last_words = error

    def _service_exited(self, kind: PeerKind, code: int) -> None:
        self.observer.fault(kind, f"exited with {code}")
        if code == MissingInput.exit_code:
            raise MissingInput(
                f"{kind}: {self._last_words or 'something it needs is missing'}", fix=self._where()
            )

    async def _restart_the_dead(self) -> None:
        """Relaunch every peer whose process has ended, within the run's budget of restarts."""
        for peer in self.peers.dead():
            self._restarts += 1
            if self._restarts > self.config.cluster.restarts:
                raise PeerLost(
                    f"{peer.name} died, and {self.config.cluster.restarts} restarts are used up",
                    fix=f"{self._where()}; then gyre train resume={self.context.layout.root}",
                )
            await self.peers.launch(peer.kind, peer.index)
            if peer.kind is PeerKind.CELL:
                self.cells.restarted(CellId(peer.index))
            elif peer.kind is PeerKind.RUNNER:
                self.executions.runner_lost()
            elif peer.kind is PeerKind.PROCESSOR:
                self._feed_processor()

    # ---- outcomes -----------------------------------------------------------------------------------------------

    def _attempt_opened(self, execution: Execution) -> None:
        self.journal.append(
            AttemptOpened(time.time(), execution.id, execution.attempt, execution.group, execution.query)
        )

    def _execution_outcome(self, execution: Execution) -> None:
        outcome = execution.outcome
        assert outcome is not None
        self.journal.append(Outcome(time.time(), outcome))
        self.observer.ended(execution)
        self.peers.send(PeerKind.PROCESSOR, 0, outcome)
        if execution.group is not None and self.config.schedule.oversample:
            self.feed(p.Outcome(execution.id, outcome.assessment is not None))
        if execution.evaluation:
            point = self.evaluations.outcome(execution.id, outcome.assessment)
            if point.complete:
                self.observer.evaluated(point)

    # ---- resume -------------------------------------------------------------------------------------------------

    def _adopt_history(self) -> None:
        """Executions as the journal has them: what was running is repeated, what is unassessed is assessed."""
        for group in self.state.groups.values():
            for id in group.executions:
                self.executions.register(id, group.id, self._query(group.id))
        for id, (attempt, group_id, query) in self.history.attempts.items():
            execution = self.executions.register(id, group_id, query)
            execution.attempt = attempt
            execution.outcome = self.history.outcomes.get(id)
            execution.sealed = self.history.sealed.get(id)
            execution.terminated = id in self.history.terminated
            execution.launched = execution.terminated or id in self.history.launched
        pending = GroupStatus.PENDING
        self._reprocess = {group.id for group in self.state.groups.values() if group.status is not pending}
        self._feed_processor()
        self._waiting_for_gateway = [item.id for item in self.executions.unfinished() if not item.terminated]
        for execution in self.executions.unfinished():
            if execution.terminated:
                execution.closed = msg.ExecutionClosed(
                    execution.id,
                    execution.attempt,
                    ClosingReason.COMPLETED,
                    0.0,
                    None,
                    "closed before the resume",
                )
                self.executions.assess_again(execution)

    def _feed_processor(self) -> None:
        """Tell a fresh processor every group that may still be trained, and the outcomes known of it."""
        for group in self.state.groups.values():
            self._expect(group)

    def _expect(self, group: Group) -> None:
        expect = msg.ExpectGroup(group.id, self._query(group.id), group.version, group.executions)
        self.peers.send(PeerKind.PROCESSOR, 0, expect)
        for id in group.executions:
            outcome = self.executions.executions[id].outcome
            if outcome is not None:
                self.peers.send(PeerKind.PROCESSOR, 0, outcome)

    async def _save_before_leaving(self) -> None:
        """A checkpoint of the newest version, unless it exists or the core is in the middle of a step."""
        version, core = self.state.version, self.state.core
        if self.weights.checkpoint[0] == version or core is None or self.batches.committing:
            return
        self._send_cell(core, msg.PublishWeights(version, checkpoint=True))
        try:
            async with asyncio.timeout(CHECKPOINT_GRACE_S):
                while self.weights.checkpoint[0] != version:
                    inbound = await self.peers.inbox.get()
                    if isinstance(inbound, Said) and isinstance(inbound.message, msg.WeightsPublished):
                        if inbound.message.checkpoint:
                            self.weights.checkpointed(inbound.message.version, inbound.message.checkpoint)
                    elif isinstance(inbound, Exited):
                        return
        except TimeoutError:
            self.observer.fault(
                "core", f"no checkpoint of version {version} within {CHECKPOINT_GRACE_S:.0f} s"
            )

    def _where(self) -> str:
        return f"see {self.context.layout.logs(self.context.epoch)}"

    # ---- small things -------------------------------------------------------------------------------------------

    def _query(self, group: GroupId) -> str:
        return queries.training_query(self.config.tasks, self.config.seed, group)

    def _send_cell(self, cell: CellId, message: msg.Message) -> None:
        self.peers.send(PeerKind.CELL, cell, message)

    def _send_gateway(self, message: msg.Message) -> None:
        self.peers.send(PeerKind.GATEWAY, 0, message)
