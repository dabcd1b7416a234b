"""What earlier controllers of a run left in its journal, folded into the state a new one starts from.

The fold replays every event through `decide`, so the schedule's state is exact; a replayed decision that differs from
the journaled one means that the code has changed under the run and raises. Then all cells are counted out: their
processes are gone, and each that comes back is added afresh.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gyre_hpc.controller.evaluations import Evaluations
from gyre_hpc.controller.forecasts import Forecasts
from gyre_hpc.controller.journal import (
    AttemptOpened,
    CheckpointWritten,
    Closed,
    Happened,
    Outcome,
    Resumed,
    Sealed,
    StepTaken,
    read_journal,
)
from gyre_hpc.errors import CorruptRecord
from gyre_hpc.records import ClosingReason, ExecutionId, GroupId, Version
from gyre_hpc.schedule.machine import decide, initial_state
from gyre_hpc.schedule.protocol import EvaluationDue, Launched, LaunchEvaluation, Publish, Terminated
from gyre_hpc.schedule.settings import Settings
from gyre_hpc.schedule.state import State
from gyre_hpc.transport.messages import ExecutionClosed, ExecutionOutcome, ExecutionSealed


@dataclass
class History:
    """State after the last journaled event. `attempts` maps executions to (attempts opened, group, query)."""

    state: State
    attempts: dict[ExecutionId, tuple[int, GroupId | None, str]] = field(default_factory=dict)
    outcomes: dict[ExecutionId, ExecutionOutcome] = field(default_factory=dict)
    closed: dict[ExecutionId, ExecutionClosed] = field(default_factory=dict)
    sealed: dict[ExecutionId, ExecutionSealed] = field(default_factory=dict)
    evaluations: Evaluations = field(default_factory=Evaluations)
    forecasts: Forecasts = field(default_factory=Forecasts)
    steps: list[StepTaken] = field(default_factory=list)
    checkpoint: tuple[Version, str] | None = None
    publications: int = 0
    started_at: float | None = None
    resumes: int = 0
    launched: set[ExecutionId] = field(default_factory=set)
    terminated: dict[ExecutionId, ClosingReason] = field(default_factory=dict)

    @property
    def fresh(self) -> bool:
        return self.started_at is None

    def release(self) -> None:
        """A controller has taken up what it needs: let go of everything that grows with the run."""
        for table in (self.attempts, self.outcomes, self.closed, self.sealed, self.launched, self.terminated):
            table.clear()
        self.steps.clear()


def read_history(folder: Path, settings: Settings) -> History:
    """Fold the journal of a run; an empty folder gives a fresh history."""
    history = History(initial_state(settings))
    for entry in read_journal(folder):
        if history.started_at is None:
            history.started_at = entry.at
        match entry:
            case Happened():
                _replay(history, entry, folder)
            case AttemptOpened(execution=id, attempt=attempt, group=group, query=query):
                history.attempts[id] = (attempt, group, query)
            case Closed(closed=closed):
                history.closed[closed.execution] = closed
            case Sealed(sealed=sealed):
                history.sealed[sealed.execution] = sealed
            case Outcome(outcome=outcome):
                history.outcomes[outcome.execution] = outcome
                history.forecasts.ended(outcome)
                if outcome.group is None:
                    history.evaluations.outcome(outcome.execution, outcome.assessment)
            case StepTaken():
                history.steps.append(entry)
            case CheckpointWritten(version=version, folder=path):
                history.checkpoint = (version, _in_run(Path(path)))
            case Resumed():
                history.resumes += 1
    return history


def _in_run(checkpoint: Path) -> str:
    """The folder relative to the run folder; an absolute one names the place where the run folder was when it was written."""
    return "/".join(checkpoint.parts[-2:])


def _replay(history: History, entry: Happened, folder: Path) -> None:
    history.state, decisions = decide(history.state, entry.event)
    if tuple(decisions) != entry.decisions:
        raise CorruptRecord(
            f"{folder}: replaying {type(entry.event).__name__} gives {decisions}, the journal has {entry.decisions}",
            fix="resume with the version of gyre_hpc that made this run (RUN/frozen.json names it)",
        )
    if isinstance(entry.event, Launched):
        history.launched.update(entry.event.ids)
    if isinstance(entry.event, Terminated):
        history.terminated.setdefault(entry.event.id, entry.event.reason)
    if isinstance(entry.event, EvaluationDue):
        history.evaluations.due(entry.event.version, entry.event.executions)
    for decision in decisions:
        history.publications += isinstance(decision, Publish)
        if isinstance(decision, LaunchEvaluation):
            for id in decision.ids:
                history.evaluations.launched(id, decision.version)
