"""Runs the schedule, unchanged, in a discrete-event world.

The simulator is the second caller of `schedule.machine.decide`: it turns decisions into events of a `World` and of a
workload, tells the schedule what happened and when, and measures. Nothing about scheduling is decided here. Executions
end on the progress clock of `rollout.py`, the open batch is `trainer.py`'s, everything else stands in one heap.

Launched is never told: it changes no decision. MicroSteps is told when nothing is left to claim or to do and, before any
other event, when so few micro-steps are unclaimed that a join could depend on their number. What is under way on a cell, for
the core or in a job that ends meanwhile never arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial

from gyre_hpc.errors import GyreError
from gyre_hpc.records import CellId, ClosingReason, ExecutionId, GroupId, Version
from gyre_hpc.schedule import protocol as p
from gyre_hpc.schedule.machine import decide, initial_state
from gyre_hpc.schedule.settings import Settings
from gyre_hpc.schedule.state import State
from gyre_hpc.simulate.agenda import NEVER, Agenda
from gyre_hpc.simulate.groups import Finished, Groups
from gyre_hpc.simulate.lines import Lines
from gyre_hpc.simulate.outcome import DeviceClock, Outcome, StepTaken
from gyre_hpc.simulate.rollout import Rollout
from gyre_hpc.simulate.trainer import Claims, Fluid, Work
from gyre_hpc.simulate.workload import GroupWork, Workload, heldout_seconds
from gyre_hpc.simulate.world import AnyFault, CellLoss, EvaluatorOutage, Preemption, World

CORE, JOB, COMMIT = "core", "job", "commit"
"""Lives on which plans depend, beside those of the cells."""


class Stuck(GyreError):
    """Nothing can happen any more, but the schedule has not stopped."""


def simulate(
    settings: Settings,
    world: World,
    workload: Workload,
    seed: int = 0,
    *,
    record: bool = False,
    until: int | None = None,
) -> Outcome:
    """One run to its end, or to the first served version of at least `until`. Raises Stuck.

    `record`: also keep the metrics lines of a live run.
    """
    groups = workload.groups(seed, settings.executions_dispatched)
    return _Simulation(settings, world, groups, heldout_seconds(workload, seed), record).run(until)


class _Simulation:
    def __init__(
        self,
        settings: Settings,
        world: World,
        groups: Iterator[GroupWork],
        heldout: Iterator[float],
        record: bool,
    ) -> None:
        if settings.capacities != world.capacities or settings.pool != world.pool.capacity:
            raise ValueError("settings and world differ in capacities")
        self._world = world
        self._state = initial_state(settings)
        self._agenda = Agenda()
        self._events: deque[p.AnyEvent] = deque()
        self._groups, self._heldout = Groups(groups), heldout
        self._seconds: dict[ExecutionId, float] = {}
        """What each launched execution needs undisturbed."""
        self._ready: dict[GroupId, Finished] = {}
        self._rollout = Rollout(world.engine, world.limit_s)
        self._work = self._make_work()
        self._batch, self._taken, self._told = -1, 0, (0, 0)
        self._nodes = {CellId(i): place.nodes for i, place in enumerate(world.cells)}
        self._down = False
        self._evaluator_back_s = self._restore_s = self._snapshot_at = 0.0
        self._checkpoint, self._publications = Version(0), 0
        self._clock = DeviceClock(self._nodes, world.pool.nodes, world.engine.tool_share)
        self.outcome = Outcome(world.nodes)
        self._lines = Lines(self.outcome.lines if record else None, lambda: self._agenda.now)

    def _make_work(self) -> Work:
        model, cells = self._world.training, self._world.cells
        if model.micro_step_s:
            return Claims(model, sum(place.nodes for place in cells) / len(cells))
        return Fluid(model)

    # ---- the loop -------------------------------------------------------------------------------------------------

    def run(self, until: int | None = None) -> Outcome:
        self._begin()
        while not self._state.finished and (until is None or self._state.published < until):
            self._pass_time()
            for execution, cut in self._rollout.pop_ended(self._agenda.now):
                self._end(execution, ClosingReason.HARNESS_TIMEOUT if cut else ClosingReason.COMPLETED)
            self._agenda.run_due()
            self._settle()
        self.outcome.seconds = self._agenda.now
        self.outcome.reason = self._state.stop_reason or ""
        self.outcome.device_time = self._clock.total(self._work.busy)
        return self.outcome

    def _begin(self) -> None:
        for fault in self._world.faults:
            self._agenda.at(fault.at_s, partial(self._strike, fault))
        if self._state.settings.evaluate_first:
            self._tell(p.EvaluationDue(Version(0), self._world.heldout))
        self._tell(p.Started())
        for cell in self._nodes:
            self._switch(cell, p.Role.ROLLOUT, self._world.cells[cell].start_s)
        self._settle()

    def _pass_time(self) -> None:
        """Move the clock to the next thing that happens."""
        now = self._agenda.now
        then = min(self._rollout.next_end(now), self._agenda.next)
        then = self._work.run(now, then)
        if then == NEVER:
            state, running = self._state, self._rollout.running
            where = (
                f"w={state.waterlevel}, C_R={state.rollout_capacity}, {running} running, {state.open_batch}"
            )
            fix = "give the world cells that come back, or a schedule that fits it"
            raise Stuck(f"simulation stuck at {now:.0f} s: {where}", fix=fix)
        if then > now:
            self._clock.advance(then - now, self._rollout.running, self._state.rollout_capacity)
            self._rollout.advance(then - now)
            self._agenda.now = then

    def _tell(self, event: p.AnyEvent) -> None:
        self._events.append(event)

    def _settle(self) -> None:
        """Tell the schedule everything that happened at this moment and carry out what it decides."""
        while True:
            if self._must_count():
                self._decide(self._count())
            elif self._events:
                self._decide(self._events.popleft())
            else:
                break
        self._rollout.settle(0 if self._down else self._state.rollout_capacity)
        self._lines.water(self._state)

    def _decide(self, event: p.AnyEvent) -> None:
        before = self._state
        self._state, decisions = decide(before, event)
        self.outcome.events += 1
        if self._state.cells is not before.cells:
            self._cells_changed(before)
        elif self._state.restoring is not before.restoring:
            self._enrol()
        if self._state.open_batch is not before.open_batch:
            self._batch_changed()
        for decision in decisions:
            self._obey(decision)

    # ---- decisions ------------------------------------------------------------------------------------------------

    def _obey(self, decision: p.AnyDecision) -> None:
        match decision:
            case p.Launch():
                self._launch({id_: self._groups.seconds(id_) for id_ in decision.ids})
            case p.LaunchEvaluation():
                self._launch({id_: next(self._heldout) for id_ in decision.ids})
            case p.Dispatch():
                known = tuple((group.group, self._groups.admit(group).forecast) for group in decision.groups)
                if self._state.unforecast:
                    self._tell(p.Forecast(known))
            case p.ToTraining():
                self._to_training(decision.cell)
            case p.ToRollout():
                self.outcome.switches += 1
                self._switch(decision.cell, p.Role.ROLLOUT, self._world.switch.return_s)
            case p.CloseBatch():
                self._commit()
            case p.Publish():
                self._agenda.after(self._world.publish_s, partial(self._publish, decision.version), CORE)
            case p.Withdraw():
                for execution in decision.ids:
                    self._rollout.cancel(execution)
                    self._end(execution, ClosingReason.CANCELLED_SURPLUS)
            case p.WriteOff():
                self.outcome.written_off += 1
            case p.RestoreCore():
                self._agenda.end(CORE)
                self._agenda.after(self._restore_s, self._restored, CORE)
            case p.EndBurst():
                self._lines.burst(self._state.burst.index, decision.version)
            case p.CloseJoinWindow() | p.Stop():
                pass

    def _to_training(self, cell: CellId) -> None:
        self.outcome.switches += 1
        prefill_s, left = self._world.engine.prefill_s, self._state.rollout_capacity
        if prefill_s:
            capacity = self._world.cells[cell].capacity
            self._rollout.repeat(capacity / (left + capacity), prefill_s)
        self._switch(cell, p.Role.TRAINING, self._world.switch.join_s)

    def _switch(self, cell: CellId, role: p.Role, seconds: float) -> None:
        self._agenda.after(seconds, lambda: self._tell(p.CellReady(cell, role)), cell)

    def _commit(self) -> None:
        batch, core = self._state.open_batch, self._state.core
        assert batch is not None
        stale = tuple(self._state.staleness(self._state.groups[id_]) for id_ in batch.groups)
        if not batch.micro_steps:
            self._tell(p.BatchDone(stepped=False))
            return
        assert core is not None
        self._agenda.end(COMMIT)
        step_s = self._world.training.step_s
        self._agenda.after(step_s, lambda: self._stepped(batch.index, stale, core), COMMIT)

    def _stepped(self, batch: int, staleness: tuple[int, ...], core: CellId) -> None:
        """The core has stepped, unless claims returned meanwhile."""
        state = self._state
        if state.open_batch is None or state.open_batch.index != batch or not state.open_batch.closed:
            return
        self._work.busy += self._world.training.step_s * self._nodes[core]
        self.outcome.steps.append(StepTaken(self._agenda.now, Version(state.version + 1), staleness))
        self._tell(p.BatchDone(stepped=True))
        self._snapshot_at = self._agenda.now + self._world.training.snapshot_s
        self._enrol()
        self._agenda.at(self._snapshot_at, self._enrol)

    def _publish(self, version: Version) -> None:
        self.outcome.published[version] = self._agenda.now
        self._publications += 1
        settings, done = self._state.settings, self._state.steps_done >= self._state.settings.steps
        if done or self._publications % self._world.checkpoint_every == 0:
            self._checkpoint = version
        self._tell(p.Published(version))
        every = self._world.evaluate_every
        if (done and settings.evaluate_last) or (every and self._publications % every == 0):
            self._tell(p.EvaluationDue(version, self._world.heldout))

    def _restored(self) -> None:
        steps = self.outcome.steps
        self.outcome.steps = [step for step in steps if step.version <= self._checkpoint]
        self._tell(p.CoreRestored(self._checkpoint))

    # ---- executions and groups ------------------------------------------------------------------------------------

    def _launch(self, seconds: dict[ExecutionId, float]) -> None:
        self._seconds |= seconds
        if not self._down:
            self._agenda.after(self._world.launch_s, lambda: self._start(tuple(seconds)), JOB)

    def _start(self, executions: tuple[ExecutionId, ...]) -> None:
        for execution in executions:
            if execution in self._seconds:
                self._rollout.launch(execution, self._seconds[execution])

    def _end(self, execution: ExecutionId, reason: ClosingReason) -> None:
        """The execution is over; when it was the group's last, the group is scored."""
        self._seconds.pop(execution, None)
        member = self._groups.member(execution)
        if member is None:
            self._tell(p.Terminated(execution, reason))
            return
        work, index = member
        surplus = reason is ClosingReason.CANCELLED_SURPLUS
        scored_s = self._world.evaluate_s if work.scored_s is None else work.scored_s
        scored_at = max(self._agenda.now + scored_s, self._evaluator_back_s)
        last = self._groups.end(execution, None if surplus else scored_at)
        self._tell(p.Terminated(execution, reason))
        if self._state.settings.oversample and not surplus:
            outcome = p.Outcome(execution, work.is_valid(index))
            self._agenda.after(scored_at - self._agenda.now, partial(self._tell, outcome))
        if last is not None:
            self._agenda.after(last[1] - self._agenda.now, partial(self._scored, last[0]))

    def _scored(self, id_: GroupId) -> None:
        """All outcomes of the group are final; a job that is not there learns of them when it is back."""
        if self._down:
            self._agenda.at(self._evaluator_back_s, lambda: self._scored(id_))
            return
        finished = self._groups.finish(id_)
        if finished.valid < 2:
            self._tell(p.GroupDead(id_, f"{finished.valid} valid executions"))
            return
        count = self._work.micro_steps(finished.work, finished.micro_steps, finished.valid)
        self._ready[id_] = finished._replace(micro_steps=count)
        self._tell(p.GroupReady(id_, count))

    # ---- training -------------------------------------------------------------------------------------------------

    def _batch_changed(self) -> None:
        """Another batch is open, or the open one has taken groups."""
        batch = self._state.open_batch
        index = -1 if batch is None else batch.index
        if index != self._batch:
            self._batch, self._taken, self._told = index, 0, (0, 0)
            self._work.begin()
        if batch is None or len(batch.groups) == self._taken:
            return
        for id_ in batch.groups[self._taken :]:
            ready = self._ready[id_]
            self._told = (self._told[0] + ready.micro_steps, self._told[1])
            self._work.add(self._agenda.now, ready.work, ready.micro_steps)
        self._taken = len(batch.groups)

    def _must_count(self) -> bool:
        """Whether the schedule would decide otherwise if it knew the claims: never before they fall below the cells."""
        told, unclaimed = self._told[0], self._work.unclaimed
        if self._told == (unclaimed, self._work.open) or self._batch < 0:
            return False
        if unclaimed > told or (0, 0) in (self._told, (unclaimed, self._work.open)):
            return True
        few = len(self._nodes)
        return bool(self._events) and min(unclaimed, few) != min(told, few)

    def _count(self) -> p.MicroSteps:
        self._told = (self._work.unclaimed, self._work.open)
        return p.MicroSteps(*self._told, self._batch, self._taken)

    def _enrol(self) -> None:
        """Cells whose join is committed may claim, satellites once they hold the weights of the last step."""
        holders = 1 if self._agenda.now < self._snapshot_at else len(self._nodes)
        cells = () if self._state.restoring else self._state.trainers[:holders]
        self._work.train(self._agenda.now, {cell: self._nodes[cell] for cell in cells})

    # ---- cells and faults -----------------------------------------------------------------------------------------

    def _cells_changed(self, before: State) -> None:
        self._enrol()
        self._clock.roles(self._state.cells, serving=not self._down)
        known = {cell.id: cell for cell in before.cells}
        for cell in self._state.cells:
            if cell != known.pop(cell.id, None):
                self._lines.role(cell.id, cell.role.value)
        for gone in known:
            self._agenda.end(gone)
            self._work.lose(self._agenda.now, gone)
            self._lines.role(gone, "lost")
        if before.core in known:
            self._agenda.end(CORE)

    def _strike(self, fault: AnyFault) -> None:
        """What happened at this moment before the fault is told before it: else it would arrive from the dead."""
        self._settle()
        match fault:
            case EvaluatorOutage(seconds=seconds):
                self._evaluator_back_s = max(self._evaluator_back_s, self._agenda.now + seconds)
            case CellLoss():
                self._lose(CellId(fault.cell), fault)
            case Preemption():
                self._preempt(fault)

    def _lose(self, cell: CellId, fault: CellLoss) -> None:
        if self._state.cell(cell) is None:
            return
        self._restore_s = fault.restore_s
        self._tell(p.CellLost(cell))
        self._settle()
        if fault.back_after_s is not None:
            self._agenda.after(fault.back_after_s, partial(self._come_back, cell), JOB)

    def _preempt(self, fault: Preemption) -> None:
        if self._down:
            return
        self._down, self._restore_s = True, fault.restore_s
        self._agenda.end(JOB)
        self._evaluator_back_s = max(self._evaluator_back_s, self._agenda.now + fault.back_after_s)
        if fault.warned and not self._state.restoring:
            self._checkpoint = self._state.core_version
        self._rollout.interrupt()
        self._tell(p.AllCellsLost())
        self._settle()
        self._agenda.after(fault.back_after_s, self._resume)

    def _come_back(self, cell: CellId) -> None:
        if self._state.cell(cell) is None:
            kind = self._state.settings.kind_of(cell)
            self._tell(p.CellAdded(cell, self._world.cells[cell].capacity, kind))

    def _resume(self) -> None:
        """The job runs again: interrupted executions start afresh under their ids."""
        self._down = False
        for cell in self._nodes:
            self._come_back(cell)
        self._launch(dict(self._seconds))
