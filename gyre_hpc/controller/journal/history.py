"""What the journal of a run says, folded: a new controller starts from it, and goes on folding what it appends.

Reading replays events through `decide`, from the newest valid snapshot or from the first entry, so the schedule's state is
exact; a replayed decision that differs from the journaled one means that the code has changed under the run and raises.
Then all cells are counted out: their processes are gone, and each that comes back is added afresh. Executions that nobody
can ask for again are forgotten at the end of each burst, so a history is bounded by what is live.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gyre_hpc.controller.journal.entries import (
    AnyEntry,
    AttemptOpened,
    CheckpointWritten,
    Closed,
    GuestsJoined,
    Happened,
    Outcome,
    Resumed,
    Sealed,
)
from gyre_hpc.controller.journal.evaluations import Evaluations
from gyre_hpc.controller.journal.forecasts import Forecasts
from gyre_hpc.controller.journal.journal import read_journal
from gyre_hpc.controller.journal.snapshots import Snapshot, valid
from gyre_hpc.errors import CorruptRecord, GyreError
from gyre_hpc.records import ClosingReason, ExecutionId, GroupId, Version
from gyre_hpc.schedule.machine import decide, initial_state
from gyre_hpc.schedule.protocol import EndBurst, EvaluationDue, Launched, LaunchEvaluation, Terminated
from gyre_hpc.schedule.settings import Settings
from gyre_hpc.schedule.state import State
from gyre_hpc.transport.messages import ExecutionClosed, ExecutionOutcome, ExecutionSealed

log = logging.getLogger(__name__)


@dataclass
class History:
    """`state` is the schedule's after the last event read. `attempts`: execution -> (attempts opened, group, query)."""

    state: State
    attempts: dict[ExecutionId, tuple[int, GroupId | None, str]] = field(default_factory=dict)
    outcomes: dict[ExecutionId, ExecutionOutcome] = field(default_factory=dict)
    closed: dict[ExecutionId, ExecutionClosed] = field(default_factory=dict)
    sealed: dict[ExecutionId, ExecutionSealed] = field(default_factory=dict)
    evaluations: Evaluations = field(default_factory=Evaluations)
    forecasts: Forecasts = field(default_factory=Forecasts)
    checkpoint: tuple[Version, str] | None = None
    publications: int = 0
    """Publications that ended a burst: one whose core was lost is made again and counts then."""
    started_at: float | None = None
    resumes: int = 0
    launched: set[ExecutionId] = field(default_factory=set)
    terminated: dict[ExecutionId, ClosingReason] = field(default_factory=dict)
    guests: int = 0
    """Guests that have ever joined: ids of cells are never used again."""

    @property
    def fresh(self) -> bool:
        return self.started_at is None

    def note(self, entry: AnyEntry) -> None:
        """The journal has this entry. `state` is not touched: who decided holds the one after it."""
        if self.started_at is None:
            self.started_at = entry.at
        match entry:
            case Happened():
                self._note_event(entry)
            case AttemptOpened(execution=id, attempt=attempt, group=group, query=query):
                self.attempts[id] = (attempt, group, query)
            case Closed(closed=closed):
                self.closed[closed.execution] = closed
            case Sealed(sealed=sealed):
                self.sealed[sealed.execution] = sealed
            case Outcome(outcome=outcome):
                self.outcomes[outcome.execution] = outcome
                self.forecasts.ended(outcome)
                if outcome.group is None:
                    self.evaluations.outcome(outcome.execution, outcome.assessment)
            case CheckpointWritten(version=version, folder=path):
                self.checkpoint = (version, _in_run(Path(path)))
            case Resumed():
                self.resumes += 1
            case GuestsJoined(cells=cells):
                self.guests += len(cells)

    def _note_event(self, entry: Happened) -> None:
        match entry.event:
            case Launched(ids=ids):
                self.launched.update(ids)
            case Terminated(id=id, reason=reason):
                self.terminated.setdefault(id, reason)
            case EvaluationDue(version=version, executions=executions):
                self.evaluations.due(version, executions)
        for decision in entry.decisions:
            self.publications += isinstance(decision, EndBurst) and decision.version is not None
            if isinstance(decision, LaunchEvaluation):
                for id in decision.ids:
                    self.evaluations.launched(id, decision.version)

    def forget_all_but(self, live: Container[GroupId], unsealed: Container[ExecutionId]) -> None:
        """Drop finished executions that a shard holds and whose group is not `live`."""
        gone = [id for id, it in self.outcomes.items() if it.group not in live and id not in unsealed]
        for id in gone:
            for table in (self.attempts, self.outcomes, self.closed, self.sealed, self.terminated):
                table.pop(id, None)
            self.launched.discard(id)

    def snapshot(self, epoch: int, offset: int, state: State) -> Snapshot:
        """All of it, after byte `offset` of the journal of `epoch`, where the schedule's state is `state`."""
        return Snapshot(
            epoch=epoch,
            offset=offset,
            state=state,
            attempts=self.attempts,
            outcomes=self.outcomes,
            closed=self.closed,
            sealed=self.sealed,
            evaluations=self.evaluations.points,
            durations=self.forecasts.durations(),
            checkpoint=self.checkpoint,
            publications=self.publications,
            started_at=self.started_at,
            resumes=self.resumes,
            launched=self.launched,
            terminated=self.terminated,
            guests=self.guests,
        )


def _restored(snapshot: Snapshot) -> History:
    return History(
        state=snapshot.state,
        attempts=snapshot.attempts,
        outcomes=snapshot.outcomes,
        closed=snapshot.closed,
        sealed=snapshot.sealed,
        evaluations=Evaluations.restored(snapshot.evaluations),
        forecasts=Forecasts.restored(snapshot.durations),
        checkpoint=snapshot.checkpoint,
        publications=snapshot.publications,
        started_at=snapshot.started_at,
        resumes=snapshot.resumes,
        launched=snapshot.launched,
        terminated=snapshot.terminated,
        guests=snapshot.guests,
    )


def read_history(folder: Path, settings: Settings) -> History:
    """What the journal of a run says; an empty folder gives a fresh history.

    A snapshot that does not go with what follows it is of other code, and an earlier start is tried. Raises CorruptRecord.
    """
    for snapshot in valid(folder):
        if snapshot.state.settings != settings:
            continue
        try:
            return _replayed(
                _restored(snapshot), read_journal(folder, snapshot.epoch, snapshot.offset), folder
            )
        except GyreError as error:
            log.warning("%s; an earlier snapshot or the whole journal is replayed", error.message)
    return _replayed(History(initial_state(settings)), read_journal(folder), folder)


def _replayed(history: History, entries: Iterable[AnyEntry], folder: Path) -> History:
    for entry in entries:
        if isinstance(entry, Happened):
            history.state, decisions = decide(history.state, entry.event)
            if tuple(decisions) != entry.decisions:
                event = type(entry.event).__name__
                raise CorruptRecord(
                    f"{folder}: replaying {event} gives {decisions}, the journal has {entry.decisions}",
                    fix="resume with the version of gyre_hpc that made this run (RUN/frozen.json names it)",
                )
        history.note(entry)
    return history


def _in_run(checkpoint: Path) -> str:
    """The folder relative to the run folder; an absolute one names the place where the run folder was when it was written."""
    return "/".join(checkpoint.parts[-2:])
