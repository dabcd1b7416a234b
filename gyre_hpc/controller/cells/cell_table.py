"""Role switches as the controller sees them: one state machine per cell, driven by messages only.

LEAVING waits for the gateway to move the cell's calls, JOINING for the trainer, LOADING and RETURNING for an engine
that confirms its version; only then is the cell routed and the schedule told. Each command has a serial of its own: an
answer to any but the newest is late, logged and changes nothing. A cell that could not pull its weights is told again
once there are others, as when the core they lay at has died. `move` is the only place that changes a phase; a
transition that is not listed raises IllegalTransition.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from gyre_hpc.controller.cells.cell_rows import NEVER, NOTHING_LOADED, Cell, CellHooks
from gyre_hpc.controller.cells.phases import TRANSITIONS, Phase
from gyre_hpc.controller.cells.step_log import StepLog
from gyre_hpc.controller.journal.entries import Direction
from gyre_hpc.errors import IllegalTransition
from gyre_hpc.records import CellId, Version
from gyre_hpc.schedule.protocol import (
    CellAdded,
    CellKind,
    CellLost,
    CellReady,
    CellRoutable,
    CellUnroutable,
    Role,
)
from gyre_hpc.transport.messages import (
    BecomeEngine,
    BecomeTrainer,
    CellSwitched,
    EngineFault,
    Manifest,
    Route,
    Serial,
    StepDone,
    StepName,
    SwitchFailed,
    SwitchPostponed,
    Unroute,
    Unrouted,
)

log = logging.getLogger(__name__)


MAX_DOUBTS = 3
"""A hung engine answers nobody and does not die: so often it is tried again before its cell is restarted."""


@dataclass
class CellTable:
    """All cells. `weights` is what engines load: set once the core has weights, replaced at publication."""

    hooks: CellHooks
    drain_s: float
    keeps_calls: bool = False
    """Running calls go on over a publication (engine.kv_policy=keep_execution)."""
    cells: dict[CellId, Cell] = field(default_factory=dict)
    weights: Manifest | None = None
    publishing: Version | None = None
    _doubted: dict[CellId, float] = field(default_factory=dict)
    _starved: dict[CellId, float] = field(default_factory=dict)
    _serial: Serial = NEVER

    def __post_init__(self) -> None:
        self.steps = StepLog(self.hooks.step, self.hooks.clock)

    def add(self, id: CellId, capacity: int, *, known: bool, kind: CellKind = CellKind.OWN) -> Cell:
        """`known`: the schedule counts this cell since its start; else it learns of it by CellAdded."""
        cell = Cell(id, capacity, known=known, kind=kind)
        self.cells[id] = cell
        return cell

    @property
    def present(self) -> list[Cell]:
        """All but the guests that are gone."""
        return [cell for cell in self.cells.values() if not cell.gone]

    def move(self, cell: Cell, to: Phase) -> None:
        """The only place that changes a phase."""
        if to is not Phase.LOST and (cell.phase, to) not in TRANSITIONS:
            raise IllegalTransition(f"cell {cell.id}: {cell.phase} -> {to}")
        previous = cell.phase
        cell.phase = to
        self.hooks.moved(cell, previous)

    # ---- life ---------------------------------------------------------------------------------------------------

    def hello(self, id: CellId) -> None:
        """The cell's leader is there; it loads weights as soon as there are any."""
        cell = self.cells[id]
        self.move(cell, Phase.IDLE)
        self._load_if_possible(cell)

    def weights_available(self, manifest: Manifest) -> None:
        """Weights exist (start, restored core): cells that have none, or could not pull earlier ones, load them."""
        self.weights = manifest
        self._feed_the_starved()
        for cell in self.cells.values():
            self._load_if_possible(cell)

    def _load_if_possible(self, cell: Cell) -> None:
        if cell.phase is Phase.IDLE and self.weights is not None and not cell.departing:
            cell.under_way = self.steps.begin(Direction.START)
            self.move(cell, Phase.LOADING)
            self._load(cell)

    def _load(self, cell: Cell) -> None:
        assert self.weights is not None
        self._starved.pop(cell.id, None)
        cell.switch, cell.told = self._next_serial(cell), self.weights
        self.hooks.cell(cell.id, BecomeEngine(Version(self.weights.version), self.weights, cell.switch))

    def _unroute(
        self, cell: Cell, drain_s: float, cause: str, *, gone: bool = False, moves: bool = False
    ) -> None:
        cell.route = self._next_serial(cell)
        self.hooks.gateway(Unroute(cell.id, drain_s, cause, cell.route, gone, moves))

    def _next_serial(self, cell: Cell) -> Serial:
        self._serial = Serial(self._serial + 1)
        self.steps.commanded(self._serial, cell.under_way)
        return self._serial

    def step_done(self, message: StepDone) -> None:
        """A cell or the gateway has ended a step of a switch, perhaps of an earlier one."""
        self.steps.told(message)

    def _end(self, cell: Cell, step: StepName, began: float) -> None:
        """The switch has ended well."""
        self.steps.own(cell.id, cell.under_way, step, began)
        cell.under_way = None

    def lost(self, id: CellId) -> None:
        """The cell's process is gone. Its calls move on, the schedule counts it out."""
        cell = self.cells[id]
        if cell.phase is Phase.LOST:
            return
        self._doubted.pop(id, None)
        self._starved.pop(id, None)
        routed = cell.phase in (Phase.ROLLOUT, Phase.LEAVING, Phase.RELOADING, Phase.DOWN)
        why = cell.reason or f"the cell was lost in {cell.phase}"
        self.steps.own(id, cell.under_way, StepName.LOST, self.hooks.clock(), outcome=why)
        cell.under_way = None
        self.move(cell, Phase.LOST)
        if routed:
            self._unroute(cell, 0.0, "the cell is lost", gone=True)
        if cell.known:
            self.hooks.feed(CellLost(id))
        cell.known = cell.announced = False

    def depart(self, id: CellId) -> bool:
        """A guest leaves: the schedule counts a serving one out and its calls move on. True when that is to be awaited."""
        cell = self.cells[id]
        cell.departing = True
        if cell.phase is not Phase.ROLLOUT:
            return False
        cell.under_way = self.steps.begin(Direction.DEPARTURE)
        self.move(cell, Phase.LEAVING)
        cell.counted_out = True
        self._unroute(cell, self.drain_s, "the cell leaves the run", moves=True)
        self.hooks.feed(CellUnroutable(id, "leaves the run"))
        return True

    def restarted(self, id: CellId) -> None:
        """A new incarnation of a lost cell has been launched."""
        cell = self.cells[id]
        self.move(cell, Phase.STARTING)
        cell.version, cell.address, cell.port, cell.reason = NOTHING_LOADED, "", "", ""
        cell.engine_dead = cell.counted_out = False

    # ---- switching ----------------------------------------------------------------------------------------------

    def to_training(self, id: CellId) -> None:
        """Move the cell's calls away first."""
        cell = self.cells[id]
        if cell.phase is Phase.LOST:
            return
        cell.under_way = self.steps.begin(Direction.TO_TRAINING)
        self.move(cell, Phase.LEAVING)
        self._unroute(cell, self.drain_s, "role switch", moves=True)

    def unrouted(
        self, message: Unrouted, core: bool, batch: int, snapshot: Manifest | None, version: Version
    ) -> None:
        """No call of ours is on the cell any more."""
        cell = self.cells[message.cell]
        if _late(message, cell.route, cell):
            return
        if cell.under_way is not None:
            self.steps.own(cell.id, cell.under_way, StepName.UNROUTE, cell.under_way.at, calls=message.cut)
        if cell.departing:
            cell.deserted = True
        elif cell.phase is Phase.LEAVING:
            self.move(cell, Phase.JOINING)
            cell.switch = self._next_serial(cell)
            weights = None if core else snapshot
            self.hooks.cell(cell.id, BecomeTrainer(batch, core, weights, version, cell.switch))
        elif cell.phase is Phase.RELOADING:
            self.move(cell, Phase.LOADING)
            self._load(cell)

    def to_rollout(self, id: CellId) -> None:
        """Load the published version into the engine; routed when it confirms it."""
        cell = self.cells[id]
        if cell.phase is Phase.LOST:
            return
        if cell.under_way is None:
            cell.under_way = self.steps.begin(Direction.TO_ROLLOUT)
        self.move(cell, Phase.RETURNING)
        self._load(cell)

    def flushed(self, id: CellId, began: float) -> None:
        """The cell's contribution is here, asked for at `began` (Unix seconds), before it returns to rollout."""
        cell = self.cells[id]
        cell.under_way = self.steps.begin(Direction.TO_ROLLOUT)
        self.steps.own(id, cell.under_way, StepName.FLUSH, began)

    def failed(self, id: CellId, message: SwitchFailed) -> None:
        """A release or a load failed: the cell is BLOCKED or QUARANTINED, which the controller ends."""
        cell = self.cells[id]
        state = Phase(message.state)
        cell.reason = f"{state}: {message.error}"
        if (cell.phase, state) not in TRANSITIONS:
            log.warning("cell-%d is %s in %s: %s", id, state, cell.phase, message.error)
            return
        routed = cell.phase in (Phase.RELOADING, Phase.ROLLOUT)
        self.move(cell, state)
        if routed:
            self._unroute(cell, 0.0, cell.reason, gone=True)

    def switched(self, id: CellId, message: CellSwitched) -> None:
        """A switch ended well."""
        cell = self.cells[id]
        if _late(message, cell.switch, cell):
            return
        self.hooks.switched(cell, message)
        began = self.hooks.clock()
        if message.role is Role.TRAINING:
            if cell.phase is Phase.JOINING:
                self.move(cell, Phase.TRAINING)
                cell.counted_out = False
                self._end(cell, StepName.JOIN, began)
                self.hooks.feed(CellReady(id, Role.TRAINING))
            return
        if cell.phase not in (Phase.LOADING, Phase.RETURNING, Phase.DOWN, Phase.RELOADING):
            return
        cell.address, cell.version, cell.port = message.address, message.version, message.port
        cell.engine_dead, cell.doubts = False, 0
        if self.weights is not None and message.version != self.weights.version:
            self.move(cell, Phase.LOADING)
            self._load(cell)
            return
        self.move(cell, Phase.ROLLOUT)
        self._route(cell)
        self._end(cell, StepName.ROUTE, began)
        self._announce(cell)

    def _route(self, cell: Cell) -> None:
        cell.route = self._next_serial(cell)
        at = (cell.id, cell.address, cell.capacity, cell.version)
        self.hooks.gateway(Route(*at, cell.route, cell.port, self.hooks.place(cell.id), cell.weights))

    def _announce(self, cell: Cell) -> None:
        """The cell serves. Said after every load, also one that replaced a newer version in the middle of a return."""
        if not cell.known:
            cell.known = cell.announced = True
            self.hooks.feed(CellAdded(cell.id, cell.capacity, cell.kind))
        elif cell.counted_out:
            self.hooks.feed(CellRoutable(cell.id))
        else:
            cell.announced = True
            self.hooks.feed(CellReady(cell.id, Role.ROLLOUT))
        cell.counted_out = False

    # ---- weights that could not be pulled -----------------------------------------------------------------------

    def postponed(self, id: CellId, message: SwitchPostponed, until: float) -> None:
        """The cell could not pull its weights; it waits for others, which may be there already."""
        cell = self.cells[id]
        if _late(message, cell.switch, cell):
            return
        self._starved[id] = until
        if cell.told != self.weights:
            self._feed_the_starved()

    def _feed_the_starved(self) -> None:
        for cell in [self.cells[id] for id in sorted(self._starved)]:
            if cell.phase is Phase.DOWN:
                self.move(cell, Phase.LOADING)
            self._load(cell)

    def starved(self, now: float) -> list[CellId]:
        """Cells whose weights could not be pulled and have not been replaced until the time they were given; told once."""
        over = sorted(id for id, until in self._starved.items() if now > until)
        for id in over:
            del self._starved[id]
        return over

    # ---- engine trouble -----------------------------------------------------------------------------------------

    def engine_died(self, id: CellId, cause: str) -> None:
        """The engine's process ended; its leader restarts it."""
        self.cells[id].engine_dead = True
        self.engine_down(id, cause)

    def engine_down(self, id: CellId, cause: str) -> None:
        """The engine died or does not answer. Its calls continue elsewhere."""
        cell = self.cells[id]
        if cell.phase is Phase.ROLLOUT:
            cell.under_way = self.steps.begin(Direction.REVIVAL)
            self.move(cell, Phase.DOWN)
            cell.counted_out = True
            self._unroute(cell, 0.0, cause, gone=True)
            self.hooks.feed(CellUnroutable(id, cause))
        elif cell.phase is Phase.LOADING and cell.announced:
            self.move(cell, Phase.DOWN)
            self.hooks.feed(CellUnroutable(id, cause))

    def doubt_engine(self, fault: EngineFault, until: float) -> bool:
        """The gateway could not use the engine: its leader says so if it died, else it is routed again at `until`.

        False when it has been doubted too often since it last loaded: the cell is to be restarted.
        """
        cell = self.cells[fault.cell]
        if _late(fault, cell.route, cell):
            return True
        self.engine_down(cell.id, fault.cause)
        self._doubted[cell.id] = until
        cell.doubts += 1
        return cell.doubts < MAX_DOUBTS

    def end_doubts(self, now: float) -> None:
        """Route engines again that nobody called dead."""
        for id in [id for id, until in self._doubted.items() if now > until]:
            del self._doubted[id]
            self.engine_answers(id)

    def engine_answers(self, id: CellId) -> None:
        """A cell held DOWN on suspicion is healthy after all."""
        cell = self.cells[id]
        if cell.phase is not Phase.DOWN or not cell.address or cell.engine_dead:
            return
        if self.weights is not None and cell.version != self.weights.version:
            self.move(cell, Phase.LOADING)
            self._load(cell)
            return
        began = self.hooks.clock()
        self.move(cell, Phase.ROLLOUT)
        self._route(cell)
        self._end(cell, StepName.ROUTE, began)
        self._announce(cell)

    def gateway_returned(self) -> None:
        """A restarted gateway knows no routes."""
        for cell in self.cells.values():
            if cell.phase is Phase.ROLLOUT or (cell.phase is Phase.RELOADING and self.keeps_calls):
                self._route(cell)
            elif cell.phase in (Phase.LEAVING, Phase.RELOADING):
                self._unroute(cell, 0.0, "the gateway restarted", gone=True)

    # ---- publication --------------------------------------------------------------------------------------------

    def publish(self, manifest: Manifest) -> None:
        """All rollout engines load the new weights; `publication_complete` tells when the last has."""
        self.weights = manifest
        self.publishing = Version(manifest.version)
        self._feed_the_starved()
        for cell in self.cells.values():
            if cell.phase is Phase.ROLLOUT:
                cell.under_way = self.steps.begin(Direction.PUBLICATION)
                self.move(cell, Phase.RELOADING)
                if self.keeps_calls:
                    self._load(cell)
                else:
                    self._unroute(cell, 0.0, "publication")

    def publication_complete(self) -> bool:
        """True once per publication, when every live engine serves it."""
        if self.publishing is None:
            return False
        busy = (Phase.RELOADING, Phase.LOADING)
        if any(cell.phase in busy and cell.known for cell in self.cells.values()):
            return False
        self.publishing = None
        return True


def _late(
    message: Unrouted | EngineFault | CellSwitched | SwitchPostponed, newest: Serial, cell: Cell
) -> bool:
    """Whether the message answers a command that a later one has replaced."""
    if message.serial == newest:
        return False
    kind = type(message).__name__
    log.info("cell-%d (%s): late %s of %d, dropped", cell.id, cell.phase, kind, message.serial)
    return True
