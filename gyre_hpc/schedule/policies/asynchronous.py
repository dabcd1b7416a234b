"""async: a fixed prefix of cells trains, the rest serves; rollout never stops. Same dispatch and staleness rules.

Cells switch only when faults leave no other way: if no rollout cell is left while executions wait, training cells
return latest-first until one serves; when capacity allows, the prefix fills up to `training_cells` again.
"""

from __future__ import annotations

from collections.abc import Callable

from gyre_hpc.schedule.policies.base import (
    Turning,
    fits_without,
    in_training,
    next_cell,
    stepping_core,
    whole_burst_ready,
)
from gyre_hpc.schedule.state import Batch, Cell, Phase, State


class Asynchronous:
    """Fixed pools."""

    def reserved(self, state: State) -> tuple[Cell, ...]:
        """The fixed training cells: the first of the order."""
        return state.cells[: state.settings.training_cells]

    def joins(self, state: State, supply: Callable[[State], int]) -> tuple[Cell, ...]:
        """The next of the fixed training cells, with or without work."""
        cell = next_cell(state)
        full = len(in_training(state)) >= state.settings.training_cells
        if cell is None or full or not fits_without(state, (cell,)):
            return ()
        runs = state.phase is Phase.BURST or cell.id in state.reserved
        return (cell,) if runs else ()

    def stays(self, state: State, turning: Turning, supply: int) -> tuple[Cell, ...]:
        """All, unless no other cell is left to serve."""
        leaving = self._until_one_serves(state, None)
        return tuple(cell for cell in in_training(state) if cell not in leaving)

    def gives_way(self, state: State) -> tuple[Cell, ...]:
        """Latest first, only until one cell serves."""
        return self._until_one_serves(state, stepping_core(state))

    def may_take(self, state: State, batch: Batch) -> bool:
        """At once when streaming, else when the whole burst is ready."""
        return state.settings.streaming or whole_burst_ready(state, batch)

    def _until_one_serves(self, state: State, keep: Cell | None) -> tuple[Cell, ...]:
        needed = state.waterlevel > 0 or bool(state.evaluations) or state.phase is Phase.ENDING
        if not needed or state.coming_capacity > 0:
            return ()
        chosen: list[Cell] = []
        for cell in reversed(in_training(state)):
            if keep is None or cell.id != keep.id:
                chosen.append(cell)
                if cell.routable:
                    break
        return tuple(chosen)
