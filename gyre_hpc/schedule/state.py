"""State of the schedule: frozen, serialisable, rebuilt only by `machine.decide`.

Every event costs about the same whatever the number of executions and groups: what the rules ask all the time is counted
when it changes (`Turn`), and what changes all the time is copied in small parts.

Read access the controller and the simulator rely on:
`dispatched`/`launched`/`terminated` (d, p, f; p counts decided launches), `waterlevel` (w), `evaluating` (e),
`rollout_capacity` (C_R); `cells` in order with `role`, `routable`, `capacity`; `core`, `restoring`; `trainers` (cells
whose join is committed, in order); `unforecast` (groups that wait for a Forecast); `open_batch` with `groups` in the order taken, `slots`, `window_open`, `closed`;
`burst` with `index`, `steps`; `groups[g]` with `version`, `executions`, `status`; `version`, `core_version`, `published`,
`steps_done`, `finished`, `stop_reason`.

A group is in `groups` from its dispatch until nothing can call for its micro-steps again: written off, or consumed in
a burst that has ended. Only then may its data be dropped. When `open_batch.groups` grows, the caller adds those groups'
micro-steps to its claims ledger before it carries out the turn's decisions (a group without micro-steps may fill and close
the batch in one turn), then reports MicroSteps; a change of `open_batch.index` makes all older claims void.
"""

from __future__ import annotations

import enum

import msgspec

from gyre_hpc.records import CellId, ExecutionId, GroupId, Version
from gyre_hpc.schedule.executions import Execution, Executions, Stage
from gyre_hpc.schedule.protocol import CellKind
from gyre_hpc.schedule.settings import Settings

__all__ = [
    "COMING_BACK",
    "IN_TRAINING",
    "Batch",
    "Burst",
    "Cell",
    "CellRole",
    "Committed",
    "Evaluation",
    "Execution",
    "Executions",
    "Group",
    "GroupStatus",
    "Phase",
    "Stage",
    "State",
    "serves",
]


class Phase(enum.StrEnum):
    """Where the run stands."""

    WAITING = "waiting"
    """Before the first dispatch."""
    BURST = "burst"
    """Groups roll out and batches train."""
    PUBLISHING = "publishing"
    """The burst's last batch is committed, its version not served yet."""
    ENDING = "ending"
    """All steps are published; held-out executions may still run."""
    STOPPED = "stopped"
    """Stop was decided; every later event is ignored."""


class CellRole(enum.StrEnum):
    """Where a cell stands between its two roles."""

    STARTING = "starting"
    ROLLOUT = "rollout"
    JOINING = "joining"
    """to_training was decided, the switch is under way."""
    TRAINING = "training"
    RECALLED = "recalled"
    """Joining, but its return is already decided: to_rollout follows as soon as the switch ends."""
    RETURNING = "returning"
    """to_rollout was decided, the switch is under way."""


IN_TRAINING = (CellRole.JOINING, CellRole.TRAINING)
"""Roles that must form a prefix of the order. (A pair is searched faster than a set: members of an enum hash slowly.)"""
COMING_BACK = (CellRole.RECALLED, CellRole.RETURNING)
"""Roles whose capacity will be rollout capacity without a further decision."""


class Cell(msgspec.Struct, frozen=True):
    """One live cell. `routable` is False while its engine cannot serve (or its switch failed)."""

    id: CellId
    capacity: int
    role: CellRole = CellRole.STARTING
    routable: bool = True
    kind: CellKind = CellKind.OWN

    @property
    def trains(self) -> bool:
        """Whether it has a place in the order in which cells leave rollout; the others come after all that have."""
        return self.kind not in (CellKind.ROLLOUT, CellKind.STANDALONE)


class GroupStatus(enum.StrEnum):
    """Life of a rollout group; a written-off group has no entry."""

    PENDING = "pending"
    READY = "ready"
    TAKEN = "taken"
    CONSUMED = "consumed"
    """Its batch is committed; until the burst ends a restored core may make it ready again."""


class Group(msgspec.Struct, frozen=True):
    """N + m executions of one query, stamped with the version published at dispatch."""

    id: GroupId
    version: Version
    executions: tuple[ExecutionId, ...]
    status: GroupStatus = GroupStatus.PENDING
    micro_steps: int = 0
    rank: int = -1
    """Position in the sequence of readiness; -1 while pending."""
    valid: tuple[ExecutionId, ...] = ()
    """Executions known to be valid (kept only when oversampling)."""
    forecast: float | None = None
    """Seconds expected of an execution (kept only when it decides the launch order); None until told."""


class Batch(msgspec.Struct, frozen=True):
    """The open batch. Indices are never used twice: a void batch is followed by one with a fresh index."""

    index: int
    slots: int
    groups: tuple[GroupId, ...] = ()
    micro_steps: int = 0
    """Micro-steps of all groups taken."""
    unclaimed: int = 0
    open: int = 0
    """Claimed and not yet done."""
    window_open: bool = True
    closed: bool = False
    """close_batch was decided, batch_done is awaited."""

    @property
    def idle(self) -> bool:
        """No micro-step is unclaimed or under way."""
        return self.unclaimed == 0 and self.open == 0


class Committed(msgspec.Struct, frozen=True):
    """A batch committed in the running burst; `version` is None when it took no step."""

    batch: int
    version: Version | None
    groups: tuple[GroupId, ...]


class Burst(msgspec.Struct, frozen=True):
    """Batches between two dispatches. `planned` is mu, or less when fewer steps are left."""

    index: int
    planned: int
    committed: tuple[Committed, ...] = ()

    @property
    def steps(self) -> int:
        """Optimizer steps taken in this burst."""
        return sum(batch.version is not None for batch in self.committed)


class Evaluation(msgspec.Struct, frozen=True):
    """Held-out executions of one version that are not finished."""

    version: Version
    queued: tuple[ExecutionId, ...]
    running: tuple[ExecutionId, ...] = ()


class State(msgspec.Struct, frozen=True):
    """Everything the schedule knows. Dicts are replaced, never changed in place."""

    settings: Settings
    cells: tuple[Cell, ...]
    """In order, the core first, those that never train last."""
    core: CellId | None
    """None while no live cell can be the core: guests cannot."""
    phase: Phase = Phase.WAITING
    started: bool = False
    restoring: bool = False
    """The core was lost; nothing trains until core_restored."""
    short: bool = False
    """Capacity was lost and training cells must give way until w + e <= C_R."""
    reserved: tuple[CellId, ...] = ()
    """Cells bound for training before they serve at all (async); never part of C_R."""
    rollout_capacity: int = 0
    """C_R: capacity of the routable rollout cells and the pool."""
    dispatched: int = 0
    launched: int = 0
    terminated: int = 0
    next_execution: ExecutionId = ExecutionId(0)
    next_group: GroupId = GroupId(0)
    next_batch: int = 0
    next_rank: int = 0
    queued: tuple[ExecutionId, ...] = ()
    """Training executions that may be launched, in launch order."""
    unforecast: tuple[GroupId, ...] = ()
    """Pending groups whose executions wait for a Forecast before they are queued."""
    executions: Executions = Executions()
    """Live ones: queued and running."""
    groups: dict[GroupId, Group] = {}
    """In id order."""
    pending: dict[Version, int] = {}
    """How many groups are pending, by stamp."""
    ready: tuple[GroupId, ...] = ()
    """Ready groups in the order in which batches take them: oldest stamp, then earliest ready."""
    evaluations: tuple[Evaluation, ...] = ()
    evaluated_first: bool = False
    evaluated_last: bool = False
    version: Version = Version(0)
    """Optimizer steps ever taken."""
    published: Version = Version(0)
    undone: tuple[Version, ...] = ()
    """Versions whose step a restored core has undone."""
    burst: Burst = Burst(index=-1, planned=0)
    open_batch: Batch | None = None
    void_bursts: int = 0
    void_reasons: tuple[str, ...] = ()
    """Why groups of the void bursts gave no step."""
    stop_reason: str | None = None
    """None while running; "" after all steps; else the fault."""

    @property
    def waterlevel(self) -> int:
        """w = d - f: queued and running executions."""
        return self.dispatched - self.terminated

    @property
    def evaluating(self) -> int:
        """e: running held-out executions."""
        return sum([len(evaluation.running) for evaluation in self.evaluations]) if self.evaluations else 0

    @property
    def coming_capacity(self) -> int:
        """C_R once the cells on their way back serve again."""
        back = sum(cell.capacity for cell in self.cells if cell.role in COMING_BACK and cell.routable)
        return self.rollout_capacity + back

    @property
    def steps_done(self) -> int:
        """Optimizer steps that count: those of the core's weights."""
        return self.step_of(self.version)

    @property
    def core_version(self) -> Version:
        """What the core's weights are: the newest version that was not undone."""
        version = self.version
        while version in self.undone:
            version = Version(version - 1)
        return version

    @property
    def finished(self) -> bool:
        """Whether Stop was decided."""
        return self.phase is Phase.STOPPED

    @property
    def trainers(self) -> tuple[CellId, ...]:
        """Training cells whose join is committed: those with no cell before them still joining."""
        found: list[CellId] = []
        for cell in self.cells:
            if cell.role is not CellRole.TRAINING:
                break
            found.append(cell.id)
        return tuple(found)

    def step_of(self, version: Version) -> int:
        """Steps behind `version` that were not undone."""
        return version - sum(undone <= version for undone in self.undone) if self.undone else version

    def staleness(self, group: Group) -> int:
        """Steps between the group's stamp and the core's weights."""
        return self.age(group.version)

    def age(self, stamp: Version) -> int:
        """Staleness of groups with this stamp; an older stamp is never less stale."""
        return self.steps_done - self.step_of(stamp)

    def cell(self, index: CellId) -> Cell | None:
        """The live cell with this id."""
        return next((cell for cell in self.cells if cell.id == index), None)

    def place(self, index: CellId) -> int:
        """Where the cell stands in the order: 0 leaves rollout first. A cell that comes back will stand last of those that train."""
        ids = [cell.id for cell in self.cells]
        return ids.index(index) if index in ids else sum(cell.trains for cell in self.cells)

    @property
    def oldest_stamp(self) -> Version | None:
        """Of the live groups."""
        stamps = list(self.pending)
        if self.ready:
            stamps.append(self.groups[self.ready[0]].version)
        return min(stamps, default=None)

    def with_status(self, *statuses: GroupStatus) -> list[Group]:
        """Groups in any of these statuses, in id order."""
        return [group for group in self.groups.values() if group.status in statuses]


def serves(cell: Cell) -> bool:
    """Whether the cell takes model calls."""
    return cell.role is CellRole.ROLLOUT and cell.routable
