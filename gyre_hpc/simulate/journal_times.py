"""When things happened in a run, from its journal alone: one pass over the entries, times in Unix seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gyre_hpc.controller.journal.entries import AttemptOpened, Happened, Outcome, Sealed, StepTaken
from gyre_hpc.controller.journal.journal import read_journal
from gyre_hpc.records import CellId, ExecutionId, GroupId, Version
from gyre_hpc.schedule import protocol as p


@dataclass(frozen=True)
class StepTimes:
    """One optimizer step. `cell_seconds`: from claim to done, summed over its micro-steps; `commit_s`: from CloseBatch."""

    groups: tuple[GroupId, ...]
    cell_seconds: float
    commit_s: float
    staleness: tuple[int, ...]


@dataclass
class JournalTimes:
    """Filled by `read_times`."""

    started_at: float = 0.0
    stopped_at: float = 0.0
    """The Stop decision, or the last entry."""
    serves_s: dict[CellId, float] = field(default_factory=dict)
    """From the start to a cell's first readiness."""
    groups: dict[GroupId, tuple[ExecutionId, ...]] = field(default_factory=dict)
    """In the order of dispatch."""
    queries: dict[ExecutionId, str] = field(default_factory=dict)
    seconds: dict[ExecutionId, float] = field(default_factory=dict)
    """From the opening of the last attempt to the execution's end, less what the gateway held its calls."""
    valid: set[ExecutionId] = field(default_factory=set)
    scored_s: dict[GroupId, float] = field(default_factory=dict)
    """From the end of a group's last execution to its fate: ready or dead."""
    micro_steps: dict[GroupId, int] = field(default_factory=dict)
    """Of ready groups."""
    steps: list[StepTimes] = field(default_factory=list)
    published: list[float] = field(default_factory=list)
    """Seconds of each publication, from its decision until the version was served."""
    published_at: list[float] = field(default_factory=list)
    losses: int = 0


def read_times(folder: Path) -> JournalTimes:
    """Read a journal folder; it may be of a run that still goes on."""
    reader = _Reader()
    for entry in read_journal(folder):
        reader.times.stopped_at = entry.at
        match entry:
            case Happened():
                reader.happened(entry)
            case AttemptOpened():
                reader.opened[entry.execution] = entry.at
                reader.times.queries[entry.execution] = entry.query
            case Sealed(sealed=sealed):
                reader.held[sealed.execution] = sealed.held_s
            case Outcome(outcome=outcome):
                if outcome.assessment is not None and outcome.assessment.valid:
                    reader.times.valid.add(outcome.execution)
            case StepTaken():
                reader.step = entry
        if reader.stopped:
            break
    return reader.times


class _Reader:
    """What is under way between two entries."""

    def __init__(self) -> None:
        self.times = JournalTimes()
        self.opened: dict[ExecutionId, float] = {}
        self.held: dict[ExecutionId, float] = {}
        self.step: StepTaken | None = None
        self.stopped = False
        self._ended: dict[ExecutionId, float] = {}
        self._batch: tuple[int | None, float, int, float] = (None, 0.0, 0, 0.0)
        """(batch, time of its last count, claims open since then, cell-seconds before)."""
        self._closed_at = 0.0
        self._publishing: dict[Version, float] = {}

    def happened(self, entry: Happened) -> None:
        """An event and its decisions."""
        times, at = self.times, entry.at
        match entry.event:
            case p.Started():
                times.started_at = times.started_at or at
            case p.CellReady(cell=cell, role=p.Role.ROLLOUT):
                times.serves_s.setdefault(cell, at - times.started_at)
            case p.Terminated(id=id_):
                self._terminated(id_, at)
            case p.GroupReady(group=group, micro_steps=count):
                times.micro_steps[group] = count
                self._fate(group, at)
            case p.GroupDead(group=group):
                self._fate(group, at)
            case p.MicroSteps() as counts:
                self._count(counts, at)
            case p.BatchDone(stepped=stepped):
                self._batch_done(stepped, at)
            case p.Published(version=version):
                if version in self._publishing:
                    times.published.append(at - self._publishing.pop(version))
                    times.published_at.append(at)
            case p.AllCellsLost() | p.CellLost():
                times.losses += 1
        self._decided(entry)

    def _decided(self, entry: Happened) -> None:
        for decision in entry.decisions:
            match decision:
                case p.Dispatch(groups=groups):
                    self.times.groups |= {group.group: group.executions for group in groups}
                case p.CloseBatch():
                    self._closed_at = entry.at
                case p.Publish(version=version):
                    self._publishing[version] = entry.at
                case p.Stop():
                    self.stopped = True

    def _terminated(self, id_: ExecutionId, at: float) -> None:
        if id_ in self.opened and id_ not in self._ended:
            self._ended[id_] = at
            self.times.seconds[id_] = max(0.0, at - self.opened[id_] - self.held.get(id_, 0.0))

    def _fate(self, group: GroupId, at: float) -> None:
        ends = [self._ended.get(id_, at) for id_ in self.times.groups.get(group, ())]
        self.times.scored_s.setdefault(group, at - max(ends, default=at))

    def _count(self, counts: p.MicroSteps, at: float) -> None:
        batch, since, held, before = self._batch
        if counts.batch != batch:
            before, held = 0.0, 0
        self._batch = (counts.batch, at, counts.open, before + held * (at - since))

    def _batch_done(self, stepped: bool, at: float) -> None:
        if stepped and self.step is not None:
            names = (name for _, mine in self.step.owners for name in mine)
            groups = dict.fromkeys(GroupId(int(name.split(".")[0])) for name in names)
            seconds = self._batch[3] if self._batch[0] == self.step.batch else 0.0
            commit_s = at - self._closed_at
            self.times.steps.append(StepTimes(tuple(groups), seconds, commit_s, self.step.staleness))
        self.step = None
