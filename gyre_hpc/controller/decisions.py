"""What the schedule decides, carried out: each decision is one call to whoever does it.

`controller.py` asks afterwards what has ended with it: groups, a burst, the run.
"""

from __future__ import annotations

import logging

from gyre_hpc.config import RunConfig
from gyre_hpc.controller.cells.cell_table import CellTable
from gyre_hpc.controller.driver import Driver
from gyre_hpc.controller.executions import queries
from gyre_hpc.controller.executions.executions import ExecutionTable
from gyre_hpc.controller.journal.history import History
from gyre_hpc.controller.monitor.observer import Observer
from gyre_hpc.controller.processing import Processing
from gyre_hpc.controller.steps import Steps
from gyre_hpc.controller.training.batches import BatchRunner
from gyre_hpc.records import GroupId, Version
from gyre_hpc.schedule import protocol as p
from gyre_hpc.transport import messages as msg

log = logging.getLogger(__name__)


class Decisions:
    """`stop_reason` is None while the schedule goes on, "" after the last step, else why it cannot go on."""

    def __init__(
        self,
        config: RunConfig,
        history: History,
        driver: Driver,
        executions: ExecutionTable,
        processing: Processing,
        cells: CellTable,
        batches: BatchRunner,
        steps: Steps,
        observer: Observer,
    ) -> None:
        self._config, self._driver = config, driver
        self._evaluations, self._forecasts = history.evaluations, history.forecasts
        self._executions, self._processing = executions, processing
        self._cells, self._batches, self._steps, self._observer = cells, batches, steps, observer
        self.stop_reason = history.state.stop_reason
        self.groups_ended = self.burst_ended = False
        """Whether one has ended since this was last set back."""

    def carry_out(self, decision: p.AnyDecision) -> None:
        """Do it, or set it going: nothing here blocks."""
        match decision:
            case p.Dispatch(groups=groups, version=version):
                for group in groups:
                    self._dispatch(group, version)
                self.forecast()
            case p.Launch(ids=ids):
                for id in ids:
                    self._executions.launch(id)
            case p.LaunchEvaluation(ids=ids):
                for id in ids:
                    position = self._evaluations.position(id)
                    self._executions.register(id, None, queries.heldout_query(self._config.tasks, position))
                    self._executions.launch(id)
            case p.Withdraw(ids=ids):
                for id in ids:
                    self._executions.withdraw(id)
            case p.ToTraining(cell=cell):
                self._cells.to_training(cell)
            case p.ToRollout(cell=cell):
                self._steps.to_rollout(cell)
            case p.CloseBatch():
                self._batches.close()
            case p.Publish(version=version):
                self._steps.publish(version)
            case p.WriteOff(group=group, reason=reason):
                self.groups_ended = True
                self._observer.fault(f"group {group}", f"written off: {reason}")
            case p.EndBurst(version=end):
                self.groups_ended = self.burst_ended = True
                self._observer.burst_ended(self._driver.state.burst.index, end)
                self._processing.send(msg.Seal())
            case p.RestoreCore(cell=cell):
                self._steps.restore_core(cell)
            case p.Stop(reason=reason):
                self.stop_reason = reason
            case p.CloseJoinWindow():
                log.debug("join window closed")

    def forecast(self) -> None:
        """Tell the schedule what it waits for before it launches (`schedule.launch_order=longest_first`)."""
        waiting = self._driver.state.unforecast
        if waiting:
            self._driver.feed(self._forecasts.event(waiting, self._query))

    def _dispatch(self, group: p.DispatchedGroup, version: Version) -> None:
        query = self._query(group.group)
        for id in group.executions:
            self._executions.register(id, group.group, query)
        self._processing.expect(group.group, version, group.executions)

    def _query(self, group: GroupId) -> str:
        return queries.training_query(self._config.tasks, self._config.seed, group)
