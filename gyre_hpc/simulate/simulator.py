"""Runs the schedule, unchanged, in a discrete-event world.

The simulator is the second caller of `schedule.machine.decide`: it turns decisions into events of a `World` and of a
workload, tells the schedule what happened and when, and measures. Nothing about scheduling is decided here. Executions
end on the progress clock of `rollout.py`, batches on the fluid of `trainer.py`, everything else stands in one heap.
Launched is never told: it changes no decision, and the schedule counts a launch from its own decision on.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator

from gyre_hpc.errors import GyreError
from gyre_hpc.records import CellId, ClosingReason, ExecutionId, GroupId, Version
from gyre_hpc.report import metrics as m
from gyre_hpc.schedule import protocol as p
from gyre_hpc.schedule.machine import decide, initial_state
from gyre_hpc.schedule.settings import Settings
from gyre_hpc.schedule.state import CellRole, State, serves
from gyre_hpc.simulate.outcome import Outcome, StepTaken
from gyre_hpc.simulate.rollout import NEVER, Rollout
from gyre_hpc.simulate.trainer import OpenBatch
from gyre_hpc.simulate.workload import GroupWork, Workload
from gyre_hpc.simulate.world import CellLoss, EvaluatorOutage, Preemption, World


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
    executions = settings.executions_dispatched
    return _Simulation(settings, world, workload.groups(seed, executions), record).run(until)


class _Group:
    """A dispatched group: its work, and how many of its executions have not ended."""

    __slots__ = ("open", "reasons", "work")

    def __init__(self, work: GroupWork) -> None:
        self.work = work
        self.open = len(work.seconds)
        self.reasons: dict[int, ClosingReason] = {}


class _Simulation:
    def __init__(self, settings: Settings, world: World, groups: Iterator[GroupWork], record: bool) -> None:
        if settings.capacities != world.capacities or settings.pool != world.pool.capacity:
            raise ValueError("settings and world differ in capacities")
        self._world = world
        self._source = groups
        self._record = record
        self._state = initial_state(settings)
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = 0
        self._events: deque[p.AnyEvent] = deque()
        self._groups: dict[GroupId, _Group] = {}
        self._members: dict[ExecutionId, tuple[GroupId, int]] = {}
        self._seconds: dict[ExecutionId, float] = {}
        self._training: dict[GroupId, float] = {}
        self._rollout = Rollout(world.engine, world.limit_s)
        self._batch = OpenBatch()
        self._trainers = 0
        self._nodes = {CellId(i): place.nodes for i, place in enumerate(world.cells)}
        self._shares: dict[tuple[str, str], float] = {}
        self._evaluator_back_s = 0.0
        self._checkpoint = Version(0)
        self._restore_after_s = 0.0
        self.outcome = Outcome(world.nodes)

    # ---- the loop -------------------------------------------------------------------------------------------------

    def run(self, until: int | None = None) -> Outcome:
        self._begin()
        while not self._state.finished and (until is None or self._state.published < until):
            self._pass_time()
            for execution, cut in self._rollout.pop_ended(self._now):
                self._ended(execution, cut)
            while self._heap and self._heap[0][0] <= self._now:
                heapq.heappop(self._heap)[2]()
            self._settle()
        self.outcome.seconds = self._now
        self.outcome.reason = self._state.stop_reason or ""
        self.outcome.device_time = {key: value for key, value in self._shares.items() if value}
        return self.outcome

    def _begin(self) -> None:
        for fault in self._world.faults:
            self._at(fault.at_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        self._events.append(p.Started())
        self._events.extend(p.CellReady(cell.id, p.Role.ROLLOUT) for cell in self._state.cells)
        self._settle()

    def _pass_time(self) -> None:
        """Move the clock to the next thing that happens."""
        now, batch = self._now, self._batch
        then = min(
            self._rollout.next_end(now),
            self._heap[0][0] if self._heap else NEVER,
            now + batch.seconds_left,
        )
        if then == NEVER:
            raise Stuck(
                f"simulation stuck at {now:.0f} s: w={self._state.waterlevel}, C_R={self._state.rollout_capacity},"
                f" {self._rollout.running} running, batch {self._state.open_batch}",
                fix="give the world cells that come back, or a schedule that fits it",
            )
        elapsed = then - now
        if elapsed > 0:
            self._account(elapsed)
            self._rollout.advance(elapsed)
            self._now = then
            if batch.left:
                batch.advance(elapsed)
                if not batch.left:
                    self._claimed()

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._ties += 1
        heapq.heappush(self._heap, (when, self._ties, action))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        """Later, or at once."""
        if seconds > 0:
            self._at(self._now + seconds, action)
        else:
            action()

    def _tell(self, event: p.AnyEvent) -> None:
        self._events.append(event)

    def _settle(self) -> None:
        """Tell the schedule everything that happened at this moment and carry out what it decides."""
        while self._events:
            before = self._state
            self._state, decisions = decide(before, self._events.popleft())
            self.outcome.events += 1
            if self._state.cells is not before.cells:
                self._roles_changed(before)
            if self._state.open_batch is not before.open_batch:
                self._batch_changed()
            for decision in decisions:
                self._obey(decision)
        self._rollout.settle(self._state.rollout_capacity)
        if self._record:
            self._note_water()

    # ---- decisions ------------------------------------------------------------------------------------------------

    def _obey(self, decision: p.AnyDecision) -> None:
        match decision:
            case p.Launch():
                self._after(self._world.launch_s, lambda: self._launch(decision.ids))
            case p.Dispatch():
                for group in decision.groups:
                    self._admit(group)
                self._forecast()
            case p.ToTraining():
                self._switch(decision.cell, p.Role.TRAINING, self._world.switch.join_s)
            case p.ToRollout():
                self._switch(decision.cell, p.Role.ROLLOUT, self._world.switch.return_s)
            case p.CloseBatch():
                self._commit()
            case p.Publish():
                self._after(self._world.publish_s, lambda: self._publish(decision.version))
            case p.Withdraw():
                for execution in decision.ids:
                    self._rollout.cancel(execution)
                    self._close(execution, ClosingReason.CANCELLED_SURPLUS)
            case p.WriteOff():
                self.outcome.written_off += 1
            case p.RestoreCore():
                self._after(self._restore_after_s, lambda: self._tell(p.CoreRestored(self._checkpoint)))
            case p.EndBurst():
                self._note(m.Burst(self._now, self._state.burst.index, decision.version))
            case p.CloseJoinWindow() | p.Stop() | p.LaunchEvaluation():
                pass

    def _admit(self, group: p.DispatchedGroup) -> None:
        work = next(self._source)
        self._groups[group.group] = _Group(work)
        for index, execution in enumerate(group.executions):
            self._members[execution] = (group.group, index)
            self._seconds[execution] = work.seconds[index]

    def _forecast(self) -> None:
        """What the schedule waits for before it launches, as the history of each query says."""
        waiting = self._state.unforecast
        if waiting:
            self._tell(p.Forecast(tuple((id_, self._groups[id_].work.forecast) for id_ in waiting)))

    def _launch(self, executions: tuple[ExecutionId, ...]) -> None:
        for execution in executions:
            if execution in self._members:
                self._rollout.launch(execution, self._seconds[execution], self._now)

    def _switch(self, cell: CellId, role: p.Role, seconds: float) -> None:
        self.outcome.switches += 1
        prefill_s = self._world.engine.prefill_s
        if role is p.Role.TRAINING and prefill_s:
            before = self._state.rollout_capacity + self._world.cells[cell].capacity
            self._rollout.delay(1 - self._state.rollout_capacity / before, prefill_s)
        self._after(seconds, lambda: self._tell(p.CellReady(cell, role)))

    def _commit(self) -> None:
        batch = self._state.open_batch
        assert batch is not None
        stale = tuple(self._state.staleness(self._state.groups[id_]) for id_ in batch.groups)
        self._after(
            self._world.training.step_s if batch.micro_steps else 0.0,
            lambda: self._committed(batch.index, batch.micro_steps > 0, stale),
        )

    def _committed(self, batch: int, stepped: bool, staleness: tuple[int, ...]) -> None:
        if self._state.open_batch is None or self._state.open_batch.index != batch:
            return
        if stepped:
            version = Version(self._state.version + 1)
            self.outcome.steps.append(StepTaken(self._now, version, staleness))
        self._tell(p.BatchDone(stepped))

    def _publish(self, version: Version) -> None:
        if self._state.restoring:
            return
        self.outcome.published[version] = self._now
        self._checkpoint = version
        self._tell(p.Published(version))

    # ---- executions and groups ------------------------------------------------------------------------------------

    def _ended(self, execution: ExecutionId, cut: bool) -> None:
        self._close(execution, ClosingReason.HARNESS_TIMEOUT if cut else ClosingReason.COMPLETED)

    def _close(self, execution: ExecutionId, reason: ClosingReason) -> None:
        """The execution is over; when it was the group's last, the group is scored."""
        member = self._members.pop(execution, None)
        if member is None:
            return
        id_, index = member
        del self._seconds[execution]
        group = self._groups[id_]
        group.reasons[index] = reason
        group.open -= 1
        self._tell(p.Terminated(execution, reason))
        scored_s = max(self._world.evaluate_s, self._evaluator_back_s - self._now)
        if reason is not ClosingReason.CANCELLED_SURPLUS and self._state.settings.oversample:
            valid = not group.work.valid or group.work.valid[index]
            self._after(scored_s, lambda: self._tell(p.Outcome(execution, valid)))
        if not group.open:
            self._after(scored_s, lambda: self._scored(id_))

    def _scored(self, id_: GroupId) -> None:
        """All outcomes of the group are final."""
        group = self._groups.pop(id_)
        kept = [
            group.work.training[index]
            for index, reason in group.reasons.items()
            if reason is not ClosingReason.CANCELLED_SURPLUS
            and (not group.work.valid or group.work.valid[index])
        ]
        if len(kept) < 2:
            self._tell(p.GroupDead(id_, f"{len(kept)} valid executions"))
            return
        self._training[id_] = sum(kept)
        self._tell(p.GroupReady(id_, len(kept)))

    # ---- training -------------------------------------------------------------------------------------------------

    def _batch_changed(self) -> None:
        """Another batch is open, or the open one has taken groups."""
        batch, fluid = self._state.open_batch, self._batch
        index = -1 if batch is None else batch.index
        if index != fluid.index:
            fluid.begin(index)
        if batch is None:
            return
        if len(batch.groups) > fluid.groups:
            fluid.add(batch.groups, self._training)

    def _claimed(self) -> None:
        """The last micro-step is claimed."""
        self._tell(p.MicroSteps(0, self._trainers, self._batch.index, self._batch.groups))
        epoch = self._batch.epoch
        self._after(self._world.training.tail_s(self._trainers), lambda: self._trained(epoch))

    def _trained(self, epoch: int) -> None:
        """The last micro-step is done, unless the batch has grown meanwhile or is void."""
        if epoch == self._batch.epoch:
            self._tell(p.MicroSteps(0, 0, self._batch.index, self._batch.groups))

    # ---- cells and faults -----------------------------------------------------------------------------------------

    def _roles_changed(self, before: State) -> None:
        trainers = self._state.trainers
        self._trainers = len(trainers)
        self._batch.rate = sum(self._nodes[cell] for cell in trainers)
        if self._record:
            known = {cell.id: cell for cell in before.cells}
            for cell in self._state.cells:
                if cell != known.pop(cell.id, None):
                    self._note(m.RoleChange(self._now, cell.id, cell.role.value))
            for gone in known:
                self._note(m.RoleChange(self._now, gone, "lost"))

    def _strike(self, fault: CellLoss | Preemption | EvaluatorOutage) -> None:
        match fault:
            case EvaluatorOutage():
                self._evaluator_back_s = max(self._evaluator_back_s, self._now + fault.seconds)
            case CellLoss():
                self._restore_after_s = fault.restore_s
                self._tell(p.CellLost(CellId(fault.cell)))
                if fault.back_after_s is not None:
                    self._after(fault.back_after_s, lambda: self._come_back(CellId(fault.cell)))
            case Preemption():
                self._restore_after_s = fault.restore_s
                self._tell(p.AllCellsLost())
                self._after(fault.back_after_s, self._resume)

    def _come_back(self, cell: CellId) -> None:
        if self._state.cell(cell) is None:
            self._tell(p.CellAdded(cell, self._world.cells[cell].capacity))

    def _resume(self) -> None:
        """The job runs again: interrupted executions start afresh under their ids."""
        self._rollout.restart(self._seconds, self._now)
        for cell in self._nodes:
            self._come_back(cell)

    # ---- measures -------------------------------------------------------------------------------------------------

    def _account(self, seconds: float) -> None:
        """Device time of the last `seconds`, by role and cause of idleness."""
        shares, state = self._shares, self._state
        for role, cause, nodes in self._uses(state):
            key = (role, cause)
            shares[key] = shares.get(key, 0.0) + nodes * seconds

    def _uses(self, state: State) -> Iterator[tuple[str, str, float]]:
        """(role, cause or "" when busy, nodes) at this moment."""
        serving, training, switching = self._world.pool.nodes, 0.0, 0.0
        for cell in state.cells:
            nodes = self._nodes[cell.id]
            if cell.role is CellRole.TRAINING:
                training += nodes
            elif serves(cell):
                serving += nodes
            elif cell.role is not CellRole.ROLLOUT:
                switching += nodes
        capacity = state.rollout_capacity
        used = min(1.0, self._rollout.running / capacity) if capacity else 0.0
        tools = self._world.engine.tool_share
        yield "rollout", "", serving * used * (1 - tools)
        yield "rollout", "tools", serving * used * tools
        yield "rollout", "no_work", serving * (1 - used)
        yield "training", self._training_cause(state), training
        yield "switching", "switching", switching
        yield "down", "down", self._world.nodes - serving - training - switching

    def _training_cause(self, state: State) -> str:
        """Why training cells have nothing to do now; "" when they have."""
        batch = state.open_batch
        if self._batch.left or (batch is not None and (batch.closed or batch.open)):
            return ""
        return "no_micro_steps" if batch is not None else "loading"

    def _note(self, line: m.AnyMetric) -> None:
        if self._record:
            self.outcome.lines.append(line)

    def _note_water(self) -> None:
        state = self._state
        self._note(
            m.Water(
                t=self._now,
                waterlevel=state.waterlevel,
                running=state.launched - state.terminated,
                capacity=state.rollout_capacity,
                evaluating=state.evaluating,
                version=state.published,
            )
        )
