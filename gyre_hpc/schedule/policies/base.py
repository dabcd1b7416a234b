"""The interface of a policy, and the arithmetic all policies share.

A policy is a pure reading of the state; it changes nothing. The machine asks it which cells leave rollout next, which
stay in training when a burst ends, which give way after a capacity loss, and whether ready groups may be taken.
Whatever it answers, the machine keeps the laws: `joins` answers are checked by property tests, not trusted.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

from gyre_hpc.schedule.state import (
    COMING_BACK,
    IN_TRAINING,
    Batch,
    Cell,
    CellRole,
    Phase,
    State,
    serves,
)


class Turning(enum.Enum):
    """Why training cells are asked to return."""

    PUBLISHED = "published"
    """A burst ended with a publication; the next dispatch has been made."""
    VOID = "void"
    """A burst ended without a step; the next dispatch has been made."""
    LAST = "last"
    """All steps are published; only held-out executions remain."""


class Policy(Protocol):
    """What differs between gyre, colocate and async."""

    def reserved(self, state: State) -> tuple[Cell, ...]:
        """Cells that train before they ever serve."""

    def joins(self, state: State, supply: Callable[[State], int]) -> tuple[Cell, ...]:
        """Cells that leave rollout at this moment, in order. `supply` counts the micro-steps free to claim."""

    def stays(self, state: State, turning: Turning, supply: int) -> tuple[Cell, ...]:
        """Cells in training that do not return at a turning."""

    def gives_way(self, state: State) -> tuple[Cell, ...]:
        """Cells in training that return now because capacity was lost, in the order of their return."""

    def may_take(self, state: State, batch: Batch) -> bool:
        """Whether a batch may take ready groups."""


def in_training(state: State) -> tuple[Cell, ...]:
    """Cells joining or training: a prefix of the order."""
    return tuple(cell for cell in state.cells if cell.role in IN_TRAINING)


def next_cell(state: State) -> Cell | None:
    """The cell that would extend the prefix; None if there is none or it cannot leave rollout now."""
    for cell in state.cells:
        if cell.role not in IN_TRAINING:
            return cell if cell.trains and serves(cell) else None
    return None


def headroom(state: State) -> int:
    """C_R - w - e: capacity that no unfinished execution needs."""
    return state.rollout_capacity - (state.dispatched - state.terminated) - state.evaluating


def fits_without(state: State, cells: tuple[Cell, ...]) -> bool:
    """w + e <= C_R - C of these rollout cells (a reserved cell has no part in C_R)."""
    leaving = 0
    for cell in cells:
        if cell.id not in state.reserved:
            leaving += cell.capacity
    return leaving <= headroom(state)


def is_short(state: State) -> bool:
    """w + e > C_R, counting the cells on their way back."""
    return state.waterlevel + state.evaluating > state.coming_capacity


def release_latest_first(state: State, keep: Cell | None) -> tuple[Cell, ...]:
    """Training cells to return, latest first, until w + e <= C_R or none is left; never `keep`."""
    chosen: list[Cell] = []
    capacity = state.coming_capacity
    for cell in reversed(in_training(state)):
        if state.waterlevel + state.evaluating <= capacity:
            break
        if keep is None or cell.id != keep.id:
            chosen.append(cell)
            capacity += cell.capacity if cell.routable else 0
    return tuple(chosen)


def stepping_core(state: State) -> Cell | None:
    """The core while it steps or publishes: it finishes that before it may return."""
    busy = state.open_batch is not None and state.open_batch.closed
    publishing = state.phase is Phase.PUBLISHING
    if state.core is None or state.restoring or not (busy or publishing):
        return None
    return state.cell(state.core)


def whole_burst_ready(state: State, batch: Batch) -> bool:
    """Whether ready groups fill all slots left in the burst, or no group is pending."""
    if not state.pending:
        return True
    slots = (state.burst.planned - len(state.burst.committed)) * batch.slots
    return len(state.ready) + len(batch.groups) >= slots


def joining(state: State) -> int:
    """Cells under way to training whose switch has not failed."""
    return sum(cell.role is CellRole.JOINING and cell.routable for cell in state.cells)


def awaits_a_join(state: State) -> bool:
    """Whether joins come one at a time and one is under way."""
    return not state.settings.overlap_joins and any(cell.role is CellRole.JOINING for cell in state.cells)


def satellites_back(state: State) -> int:
    """C_R once every satellite serves again, the core still training."""
    back = (*COMING_BACK, *IN_TRAINING)
    satellites = (cell for cell in state.cells if cell.id != state.core)
    return state.rollout_capacity + sum(
        cell.capacity for cell in satellites if cell.role in back and cell.routable
    )
