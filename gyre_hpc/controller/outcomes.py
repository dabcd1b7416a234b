"""Attempts that begin and executions that end: journaled, counted, and told to whoever needs to know.

Called by the table of executions, through the hooks that `assembly.py` gives it, and for what an earlier controller left.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from gyre_hpc.controller.driver import Driver
from gyre_hpc.controller.executions.executions import Execution
from gyre_hpc.controller.executions.walltime import Durations
from gyre_hpc.controller.journal.entries import AttemptOpened, Outcome
from gyre_hpc.controller.journal.evaluations import Evaluations
from gyre_hpc.controller.journal.journal import Journal
from gyre_hpc.controller.monitor.observer import Observer
from gyre_hpc.controller.processing import Processing
from gyre_hpc.schedule import protocol as p
from gyre_hpc.transport.messages import ExecutionOutcome


@dataclass
class OutcomeKeeper:
    """`oversampled`: the schedule launches more executions of a group than it needs."""

    oversampled: bool
    driver: Driver
    journal: Journal
    observer: Observer
    durations: Durations
    evaluations: Evaluations
    processing: Processing

    def opened(self, execution: Execution) -> None:
        """An attempt begins."""
        self.journal.append(
            AttemptOpened(time.time(), execution.id, execution.attempt, execution.group, execution.query)
        )

    def ended(self, execution: Execution) -> bool:
        """An execution has its outcome. Returns whether anybody can ask for it again."""
        outcome = execution.outcome
        assert outcome is not None
        point = self.evaluations.of(execution.id) if execution.evaluation else None
        self.journal.append(Outcome(time.time(), outcome))
        self.observer.ended(execution)
        self.durations.ended(outcome)
        self.processing.outcome(outcome)
        if execution.group is not None:
            self.count_valid(outcome)
        if point is not None and point.complete:
            self.observer.evaluated(point)
        return execution.group in self.driver.state.groups

    def count_valid(self, outcome: ExecutionOutcome) -> None:
        """Oversampling goes by valid outcomes; a repeat changes nothing."""
        if self.oversampled:
            assessment = outcome.assessment
            self.driver.feed(p.Outcome(outcome.execution, assessment is not None and assessment.valid))
