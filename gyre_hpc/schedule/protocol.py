"""Events and decisions: the closed language between the schedule and its callers (controller, simulator).

Everything here is frozen, serialisable (msgspec, tagged) and journaled. Ids are minted by the schedule.
`decide(state, event) -> (state, decisions)` in `machine.py` is the only consumer of events.
"""

from __future__ import annotations

import enum

import msgspec

from gyre_hpc.records import CellId, ClosingReason, ExecutionId, GroupId, Version


class Role(enum.StrEnum):
    """Role a cell is ready to serve."""

    ROLLOUT = "rollout"
    TRAINING = "training"


class CellKind(enum.StrEnum):
    """What a cell may become."""

    OWN = "own"
    """Of the run's own job: trains, and may be the core."""
    SATELLITE = "satellite"
    """A guest that trains; never the core, because it may vanish at any time."""
    ROLLOUT = "rollout"
    """A guest that only serves calls."""
    STANDALONE = "standalone"
    """Of the run's own job and its standalone pool: serves calls for the whole run."""


class Event(msgspec.Struct, frozen=True, tag_field="event"):
    """Base of all events."""


class Started(Event, tag="started", frozen=True):
    """The run begins: all configured cells exist, none is ready."""


class Launched(Event, tag="launched", frozen=True):
    """These executions' harnesses have been started."""

    ids: tuple[ExecutionId, ...]


class Forecast(Event, tag="forecast", frozen=True):
    """Seconds expected of an execution of each group. Needed after each Dispatch with `launch_order=longest_first`: the
    group's executions wait for it. The first forecast of a group counts; with `fifo` none does."""

    groups: tuple[tuple[GroupId, float], ...]


class Terminated(Event, tag="terminated", frozen=True):
    """The execution will make no further call. Raises f exactly once; a repeat changes nothing."""

    id: ExecutionId
    reason: ClosingReason


class Outcome(Event, tag="outcome", frozen=True):
    """The outcome of a terminated execution is final: `valid`, or excluded. Needed only with `oversample` > 0."""

    id: ExecutionId
    valid: bool


class GroupReady(Event, tag="group_ready", frozen=True):
    """All executions closed, outcomes final, at least 2 valid. `micro_steps` may be 0 (zero spread)."""

    group: GroupId
    micro_steps: int


class GroupDead(Event, tag="group_dead", frozen=True):
    """All executions closed and fewer than 2 valid: nothing can be trained."""

    group: GroupId
    reason: str


class MicroSteps(Event, tag="micro_steps", frozen=True):
    """Claims ledger of the open batch: `unclaimed` may be claimed, `open` are claimed and not yet done.

    `batch` and `groups` (how many groups the counts cover) let the schedule drop a report that was overtaken: by a
    growing batch, or by a new one. Without them the caller vouches that the counts cover every group of the open batch.
    """

    unclaimed: int
    open: int
    batch: int | None = None
    groups: int | None = None


class BatchDone(Event, tag="batch_done", frozen=True):
    """The closed batch was committed. `stepped` is False when no micro-step existed: the version stays."""

    stepped: bool


class Published(Event, tag="published", frozen=True):
    """Version `version` is served from now on (all live engines confirmed it or left)."""

    version: Version


class CellReady(Event, tag="cell_ready", frozen=True):
    """A cell finished its switch (or its start) and serves `role`."""

    cell: CellId
    role: Role


class CellUnroutable(Event, tag="cell_unroutable", frozen=True):
    """A rollout cell cannot take calls (SUSPECT, engine restart, BLOCKED, QUARANTINED); its capacity is gone."""

    cell: CellId
    cause: str


class CellRoutable(Event, tag="cell_routable", frozen=True):
    """An unroutable rollout cell serves again."""

    cell: CellId


class CellLost(Event, tag="cell_lost", frozen=True):
    """The cell is gone for good; its claims have returned."""

    cell: CellId


class AllCellsLost(Event, tag="all_cells_lost", frozen=True):
    """Every cell is gone at once (the controller resumes after their end); each that comes back is added."""


class CellAdded(Event, tag="cell_added", frozen=True):
    """A cell joined (replacement or growth) and serves rollout; it appears at the end of the order of its like."""

    cell: CellId
    capacity: int
    kind: CellKind = CellKind.OWN


class CoreRestored(Event, tag="core_restored", frozen=True):
    """The new core loaded checkpoint `version`; steps above it are undone."""

    version: Version


class EvaluationDue(Event, tag="evaluation_due", frozen=True):
    """`executions` held-out executions of version `version` should run when capacity is spare."""

    version: Version
    executions: int


class Tick(Event, tag="tick", frozen=True):
    """Seconds since the run started, on the caller's clock. The only way time enters."""

    now: float


class Decision(msgspec.Struct, frozen=True, tag_field="decision"):
    """Base of all decisions."""


class DispatchedGroup(msgspec.Struct, frozen=True):
    """A group and the executions minted for it."""

    group: GroupId
    executions: tuple[ExecutionId, ...]


class Dispatch(Decision, tag="dispatch", frozen=True):
    """New groups enter the ledger, stamped with the published version."""

    groups: tuple[DispatchedGroup, ...]
    version: Version


class Launch(Decision, tag="launch", frozen=True):
    """Start these training executions."""

    ids: tuple[ExecutionId, ...]


class LaunchEvaluation(Decision, tag="launch_evaluation", frozen=True):
    """Start these held-out executions of `version`."""

    ids: tuple[ExecutionId, ...]
    version: Version


class Withdraw(Decision, tag="withdraw", frozen=True):
    """End these executions (surplus, or a written-off group): queued ones never start, running ones are cancelled."""

    ids: tuple[ExecutionId, ...]


class ToTraining(Decision, tag="to_training", frozen=True):
    """Switch the cell from rollout to training."""

    cell: CellId


class ToRollout(Decision, tag="to_rollout", frozen=True):
    """Flush the cell's contribution and switch it back to rollout."""

    cell: CellId


class CloseJoinWindow(Decision, tag="close_join_window", frozen=True):
    """No further cell joins this batch unless claims return."""


class CloseBatch(Decision, tag="close_batch", frozen=True):
    """All slots are consumed or written off: collect contributions, step once."""


class Publish(Decision, tag="publish", frozen=True):
    """Publish the core's weights as `version`."""

    version: Version


class WriteOff(Decision, tag="write_off", frozen=True):
    """The group uses no slot and is never trained."""

    group: GroupId
    reason: str


class EndBurst(Decision, tag="end_burst", frozen=True):
    """The burst ended at `version`, or void (no step was taken)."""

    version: Version | None


class RestoreCore(Decision, tag="restore_core", frozen=True):
    """This cell becomes the core: load the last checkpoint (the caller knows which), then report CoreRestored."""

    cell: CellId


class Stop(Decision, tag="stop", frozen=True):
    """The run is over: `reason` is empty when all configured steps are done, else it names the fault."""

    reason: str


AnyEvent = (
    Started
    | Launched
    | Forecast
    | Terminated
    | Outcome
    | GroupReady
    | GroupDead
    | MicroSteps
    | BatchDone
    | Published
    | CellReady
    | CellUnroutable
    | CellRoutable
    | CellLost
    | AllCellsLost
    | CellAdded
    | CoreRestored
    | EvaluationDue
    | Tick
)
AnyDecision = (
    Dispatch
    | Launch
    | LaunchEvaluation
    | Withdraw
    | ToTraining
    | ToRollout
    | CloseJoinWindow
    | CloseBatch
    | Publish
    | WriteOff
    | EndBurst
    | RestoreCore
    | Stop
)
