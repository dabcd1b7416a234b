"""What the journal of a run can say: one record for each kind of thing that happens.

A record's name is its tag on disk, so neither changes without breaking the resume of runs that are under way.
"""

from __future__ import annotations

import enum

import msgspec

from gyre_hpc.records import CellId, ExecutionId, GroupId, Version
from gyre_hpc.schedule.protocol import AnyDecision, AnyEvent, CellKind
from gyre_hpc.transport.messages import ExecutionClosed, ExecutionOutcome, ExecutionSealed, StepName


class Direction(enum.StrEnum):
    """Why a cell goes through steps."""

    START = "start"
    TO_TRAINING = "to_training"
    TO_ROLLOUT = "to_rollout"
    PUBLICATION = "publication"
    REVIVAL = "revival"
    """Its engine died, or was doubted."""
    DEPARTURE = "departure"
    """A guest leaves the run."""


class Entry(msgspec.Struct, frozen=True, tag=True):
    """Base of journal entries. `at` is Unix seconds."""

    at: float


class Happened(Entry, frozen=True):
    """An event fed to the schedule, with the decisions it gave."""

    event: AnyEvent
    decisions: tuple[AnyDecision, ...]


class AttemptOpened(Entry, frozen=True):
    """An execution was given to gateway and runner."""

    execution: ExecutionId
    attempt: int
    group: GroupId | None
    query: str


class Closed(Entry, frozen=True):
    """The harness of an attempt has ended."""

    closed: ExecutionClosed


class Sealed(Entry, frozen=True):
    """The gateway's account of a closed attempt."""

    sealed: ExecutionSealed


class Outcome(Entry, frozen=True):
    """The final word on an execution: never counted twice, never lost."""

    outcome: ExecutionOutcome


class StepTaken(Entry, frozen=True):
    """Everything needed to replay a step: contributions in order, each with its micro-steps in order.

    In one frame with the BatchDone that it made happen: a version is taken once, with its record.
    """

    batch: int
    version: Version
    executions: int
    owners: tuple[tuple[CellId, tuple[str, ...]], ...]
    metrics: dict[str, float]
    staleness: tuple[int, ...]
    tokens_trained: int


class CheckpointWritten(Entry, frozen=True):
    """A checkpoint is complete on disk. `folder` is relative to the run folder; a reader takes an absolute one as well."""

    version: Version
    folder: str


class Resumed(Entry, frozen=True):
    """A controller of a later epoch goes on from here."""

    epoch: int


class GuestsJoined(Entry, frozen=True):
    """A cell host was given these cells, under ids that no cell of the run has had. `job` is "" outside Slurm."""

    cells: tuple[CellId, ...]
    kind: CellKind
    job: str
    host: str


class SwitchStep(Entry, frozen=True):
    """A step of a role switch, a publication or a start has ended; `at` is when the controller heard of it.

    `switch` numbers the switches of one controller. `start`, `end`: Unix seconds on the host that took it. `outcome` is
    "done", or why not. See cells/switch_steps.py.
    """

    direction: Direction
    cell: CellId
    switch: int
    step: StepName
    start: float
    end: float
    bytes: int
    pages: int
    calls: int
    outcome: str


AnyEntry = (
    Happened
    | AttemptOpened
    | Closed
    | Sealed
    | Outcome
    | StepTaken
    | CheckpointWritten
    | Resumed
    | GuestsJoined
    | SwitchStep
)
