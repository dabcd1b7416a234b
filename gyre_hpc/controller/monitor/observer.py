"""What the controller writes for people: metrics lines and the terminal. Decides nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from gyre_hpc.controller.cells.cell_rows import Cell
from gyre_hpc.controller.cells.phases import Phase
from gyre_hpc.controller.executions.executions import Execution
from gyre_hpc.controller.journal.entries import AnyEntry, Direction, StepTaken, SwitchStep
from gyre_hpc.controller.journal.evaluations import EvaluationPoint
from gyre_hpc.controller.monitor.idle import IdleMeter, role_and_cause
from gyre_hpc.controller.monitor.progress import Progress
from gyre_hpc.controller.training.batches import BatchRunner
from gyre_hpc.records import CellId, Version
from gyre_hpc.report import metrics as m
from gyre_hpc.schedule.state import State
from gyre_hpc.training.metrics import alarms
from gyre_hpc.transport.messages import CellSwitched, GroupProcessed, StepName

log = logging.getLogger(__name__)
BUSY_LINE_S = 2.0
CUT_BY_PUBLICATION = (Direction.PUBLICATION, StepName.UNROUTE)


class Observer:
    """Writes `metrics.jsonl` and drives the progress display.

    `now` is seconds since the run's first start; `clock` only measures intervals.
    """

    def __init__(
        self,
        writer: m.MetricsWriter,
        progress: Progress,
        now: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.writer, self.progress, self.now, self.clock = writer, progress, now, clock
        self._idle = IdleMeter()
        self._sampled_at = self._busy_line_at = self._step_started = clock()
        self._water: tuple[int, ...] = ()
        self._switching: dict[CellId, tuple[float, dict[str, float]]] = {}
        self._publishing_since, self._cut = clock(), 0

    def water(self, state: State) -> None:
        """One line per change of the ledger."""
        running = state.launched - state.terminated
        line = (state.waterlevel, running, state.rollout_capacity, state.evaluating, int(state.published))
        if line != self._water:
            self._water = line
            self.writer.write(m.Water(self.now(), *line))

    def opened(self, transport: str) -> None:
        """A controller has taken over the run; its regions travel by `transport`."""
        self.writer.write(m.Opened(self.now(), transport))

    def restored(self, version: Version) -> None:
        """The core goes on from this version."""
        self.writer.write(m.Restored(self.now(), version))

    def batch_opened(self) -> None:
        self._step_started = self.clock()

    def step(self, record: StepTaken, step: int, groups: list[GroupProcessed], micro_steps: int) -> None:
        """The optimizer has stepped; `step` of the steps that count, from 1."""
        rewards = [reward for group in groups for reward in group.rewards]
        line = m.Step(
            t=self.now(),
            version=record.version,
            score=sum(rewards) / len(rewards) if rewards else None,
            groups=len(groups),
            executions=record.executions,
            micro_steps=micro_steps,
            tokens_trained=record.tokens_trained,
            staleness=record.staleness,
            metrics=record.metrics,
            seconds=self.clock() - self._step_started,
        )
        self.writer.write(line)
        self.progress.step(line, step)
        for alarm in alarms(record.metrics):
            self.fault(f"step {step}", alarm)

    def publishing(self) -> None:
        """The core is asked for the weights of a new version."""
        self._publishing_since, self._cut = self.clock(), 0

    def heard(self, entry: AnyEntry) -> None:
        """An entry of the journal: calls that a publication has cut."""
        if isinstance(entry, SwitchStep) and (entry.direction, entry.step) == CUT_BY_PUBLICATION:
            self._cut += entry.calls

    def published(self, version: Version) -> None:
        """Every live engine serves the version."""
        seconds = self.clock() - self._publishing_since
        self.writer.write(m.Published(self.now(), version, seconds, self._cut))

    def ended(self, execution: Execution) -> None:
        """An execution has its final outcome."""
        outcome, sealed = execution.outcome, execution.sealed
        assert outcome is not None
        self.writer.write(
            m.Ended(
                t=self.now(),
                execution=execution.id,
                group=execution.group,
                reason=outcome.reason,
                score=outcome.assessment.score if outcome.assessment is not None else None,
                wall_s=outcome.wall_s,
                calls=sealed.calls if sealed else 0,
                calls_rerouted=sealed.calls_rerouted if sealed else 0,
                calls_lost=sealed.calls_lost if sealed else 0,
                tokens_sampled=sealed.tokens_sampled if sealed else 0,
                tokens_recomputed=sealed.tokens_recomputed if sealed else 0,
                prompt_tokens=sealed.prompt_tokens if sealed else 0,
                held_s=sealed.held_s if sealed else 0.0,
                calls_unknown=sealed.calls_unknown if sealed else 0,
                pages_due=sealed.pages_due if sealed else 0,
                pages_found=sealed.pages_found if sealed else 0,
                kv_lag=sealed.kv_lag if sealed else 0,
                tokens_on_old_kv=sealed.tokens_on_old_kv if sealed else 0,
                tokens_cached=sealed.tokens_cached if sealed else 0,
                calls_over_versions=sealed.calls_over_versions if sealed else 0,
            )
        )

    def evaluated(self, point: EvaluationPoint) -> None:
        line = m.Evaluated(
            self.now(), point.version, point.mean, point.standard_error, len(point.scores), point.invalid
        )
        self.writer.write(line)
        self.progress.evaluated(line)

    def burst_ended(self, index: int, version: int | None) -> None:
        self.writer.write(m.Burst(self.now(), index, version))

    def joined(self, cell: CellId, batch: int, mid_batch: bool) -> None:
        self.writer.write(m.Join(self.now(), cell, batch, mid_batch))

    def switched(self, cell: Cell, message: CellSwitched) -> None:
        """The cell says how long the parts of its switch took; `moved` writes the line when the switch is over."""
        if cell.id in self._switching:
            _, parts = self._switching[cell.id]
            for part, seconds in message.phases.items():
                parts[part] = parts.get(part, 0.0) + seconds

    def moved(self, cell: Cell, previous: Phase) -> None:
        """A cell changed its phase. A switch lasts from LEAVING to TRAINING, or from RETURNING to ROLLOUT."""
        log.info("cell-%d: %s -> %s", cell.id, previous, cell.phase)
        now = self.now()
        self.writer.write(m.RoleChange(now, cell.id, cell.phase, cell.reason))
        if cell.phase in (Phase.LEAVING, Phase.RETURNING):
            self._switching[cell.id] = (now, {})
        elif cell.phase is Phase.JOINING and cell.id in self._switching:
            began, parts = self._switching[cell.id]
            parts[StepName.DRAIN] = now - began
        elif cell.phase in (Phase.TRAINING, Phase.ROLLOUT) and cell.id in self._switching:
            began, parts = self._switching.pop(cell.id)
            self.writer.write(m.Switch(now, cell.id, cell.phase, now - began, parts))
        elif cell.phase in (Phase.DOWN, Phase.LOST, Phase.BLOCKED, Phase.QUARANTINED):
            self._switching.pop(cell.id, None)

    def guests(self, text: str) -> None:
        """Cells of another job come or go."""
        log.info("%s", text)
        self.progress.note(text)

    def came(self, cell: CellId) -> None:
        """A guest is to be started: its row in the timeline begins."""
        self.writer.write(m.RoleChange(self.now(), cell, Phase.STARTING))

    def gone(self, cell: CellId) -> None:
        """A guest never comes back: its row in the timeline ends."""
        self.writer.write(m.RoleChange(self.now(), cell, m.GONE))

    def fault(self, who: str, what: str) -> None:
        log.warning("%s: %s", who, what)
        self.writer.write(m.Fault(self.now(), who, what))
        self.progress.fault(who, what)

    def sample(
        self,
        cells: Iterable[Cell],
        batch: BatchRunner,
        state: State,
        running_calls: dict[int, int],
        publishing: bool,
    ) -> None:
        """Attribute the time since the last sample to each cell's role and cause."""
        now = self.clock()
        seconds, self._sampled_at = now - self._sampled_at, now
        executing = state.launched - state.terminated + state.evaluating
        for cell in cells:
            busy = batch.works(cell.id) or (publishing and cell.id == state.core)
            role, cause = role_and_cause(
                cell.phase, running=running_calls.get(cell.id, 0), executing=executing, training_busy=busy
            )
            self._idle.sample(cell.id, role, cause, seconds)
        if now - self._busy_line_at > BUSY_LINE_S:
            self._busy_line_at = now
            self._write_busy()

    def _write_busy(self) -> None:
        for id, role, cause, total in self._idle.flush():
            self.writer.write(m.Busy(self.now(), id, role, total, 0.0 if cause else total, cause))

    def close(self) -> None:
        self._write_busy()
        self.writer.close()
