"""Cells: their order, the core, and every change of role.

Cells joining or training are a prefix of the order; guests that never train stand at its end. A cell that joins while its return is decided is recalled: its
to_rollout follows when the switch has ended, so a cell never has two switches under way. A switch that failed (reported
as cell_unroutable while joining or returning) ends by cell_ready for the role it was meant for, or by cell_lost; a
cell_ready(rollout) from a joining cell only says that its engine came back before the switch began.

After a capacity loss the order is renumbered over live cells and training cells return until w + e <= C_R. The first
live cell of the run's own that has ever been ready becomes the core when the core is lost; guests never do.
"""

from __future__ import annotations

from gyre_hpc.errors import IllegalTransition
from gyre_hpc.records import CellId
from gyre_hpc.schedule.batches import supply, void_batch
from gyre_hpc.schedule.policies import policy_of
from gyre_hpc.schedule.policies.base import headroom, in_training, is_short
from gyre_hpc.schedule.protocol import (
    CellAdded,
    CellKind,
    CellLost,
    CellReady,
    CellRoutable,
    CellUnroutable,
    RestoreCore,
    Role,
    ToRollout,
    ToTraining,
)
from gyre_hpc.schedule.state import IN_TRAINING, Cell, CellRole
from gyre_hpc.schedule.turn import Turn

READY = {
    (CellRole.STARTING, Role.ROLLOUT): CellRole.ROLLOUT,
    (CellRole.ROLLOUT, Role.ROLLOUT): CellRole.ROLLOUT,
    (CellRole.RETURNING, Role.ROLLOUT): CellRole.ROLLOUT,
    (CellRole.JOINING, Role.ROLLOUT): CellRole.JOINING,
    (CellRole.RECALLED, Role.ROLLOUT): CellRole.RECALLED,
    (CellRole.JOINING, Role.TRAINING): CellRole.TRAINING,
    (CellRole.TRAINING, Role.TRAINING): CellRole.TRAINING,
    (CellRole.RECALLED, Role.TRAINING): CellRole.RETURNING,
}
"""(role before, role reported ready) -> role after; every other pair is illegal."""


def cell_ready(turn: Turn, event: CellReady) -> None:
    """A switch or a start ended well. Raises IllegalTransition for a role the cell was not asked for."""
    cell = turn.state.cell(event.cell)
    if cell is None:
        return
    role = READY.get((cell.role, event.role))
    if role is None:
        raise IllegalTransition(
            f"cell {cell.id}: {cell.role} -> {event.role}, which no decision asked for",
            fix="report CellReady once per switch, in the order the cell made them",
        )
    turn.set_role(cell, role, routable=True)
    if cell.role is CellRole.RECALLED and role is CellRole.RETURNING:
        turn.emit(ToRollout(cell.id))


def cell_unroutable(turn: Turn, event: CellUnroutable) -> None:
    """Its capacity is gone at once; training cells give way at once only if none is left."""
    _set_routable(turn, event.cell, False)
    if turn.state.coming_capacity == 0:
        turn.update(short=True)


def cell_routable(turn: Turn, event: CellRoutable) -> None:
    """Its capacity is back."""
    _set_routable(turn, event.cell, True)


def _set_routable(turn: Turn, id_: CellId, routable: bool) -> None:
    cell = turn.state.cell(id_)
    if cell is not None:
        turn.set_role(cell, cell.role, routable=routable)


def cell_added(turn: Turn, event: CellAdded) -> None:
    """A replacement or a guest serves rollout from the end of the order of cells like it."""
    if turn.state.cell(event.cell) is not None:
        raise IllegalTransition(
            f"cell {event.cell}: live -> added", fix="report CellLost before a cell with the same id is added"
        )
    added = Cell(event.cell, event.capacity, CellRole.ROLLOUT, kind=event.kind)
    cells = sorted((*turn.state.cells, added), key=lambda cell: not cell.trains)
    turn.set_order(tuple(cells), turn.state.reserved)


def cell_lost(turn: Turn, event: CellLost) -> None:
    """Renumber the order; without the core the open batch is void and nothing trains until it is restored."""
    state = turn.state
    if state.cell(event.cell) is None:
        return
    turn.set_order(
        tuple(cell for cell in state.cells if cell.id != event.cell),
        tuple(id_ for id_ in state.reserved if id_ != event.cell),
    )
    turn.update(short=True)
    if event.cell == state.core:
        void_batch(turn)
        turn.update(core=None, restoring=True)


def all_cells_lost(turn: Turn) -> None:
    """Nobody is left to give way or to become the core."""
    void_batch(turn)
    turn.set_order((), ())
    turn.update(core=None, restoring=True, short=False)


def restore_core(turn: Turn) -> None:
    """Make the first live cell that can be it the core. If that changes the order, no cell is bound for training any more,
    and guests that trained before it return."""
    state = turn.state
    if state.core is not None:
        return
    fit = (cell for cell in state.cells if cell.kind is CellKind.OWN and cell.role is not CellRole.STARTING)
    heir = next(fit, None)
    if heir is None:
        return
    if heir is not state.cells[0]:
        if heir.role not in IN_TRAINING:
            recall(turn, in_training(state))
        rest = tuple(cell for cell in turn.state.cells if cell.id != heir.id)
        turn.set_order((heir, *rest), ())
    turn.update(core=heir.id)
    turn.emit(RestoreCore(heir.id))


def recall(turn: Turn, cells: tuple[Cell, ...]) -> None:
    """Return these joining or training cells to rollout."""
    for cell in cells:
        if cell.role is CellRole.TRAINING:
            turn.set_role(cell, CellRole.RETURNING)
            turn.emit(ToRollout(cell.id))
        else:
            turn.set_role(cell, CellRole.RECALLED)


def give_way(turn: Turn) -> None:
    """After a capacity loss, training cells return as the policy names them, until enough capacity is left.

    No cell stays bound for training then: it would wait for ever behind one that serves again.
    """
    if turn.state.short:
        leaving = policy_of(turn.state).gives_way(turn.state)
        recall(turn, leaving)
        if leaving:
            turn.unreserve(*turn.state.reserved)
        turn.update(short=is_short(turn.state) or turn.state.coming_capacity == 0)


def join(turn: Turn) -> None:
    """Send cells to training while the policy names one; not before every dispatched group has been queued.

    While w + e > C_R no policy may name a cell, so none is asked.
    """
    while not turn.state.restoring and not turn.state.unforecast and headroom(turn.state) >= 0:
        cells = policy_of(turn.state).joins(turn.state, supply)
        if not cells:
            return
        for cell in cells:
            turn.set_role(cell, CellRole.JOINING)
            turn.unreserve(cell.id)
            turn.emit(ToTraining(cell.id))
