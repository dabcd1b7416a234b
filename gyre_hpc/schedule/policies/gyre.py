"""gyre: cells leave rollout one by one as the waterlevel falls, and join the batch under way.

The next cell of the order may train iff w + e <= C_R - C_next and micro-steps are free beyond those that cells already
under way will take; without `overlap_joins` only once the cell before it has joined. At a publication satellites return at once; the core stays iff the next batch has work and
w + e <= C_R with the satellites back (paper Eq. 6).
"""

from __future__ import annotations

from collections.abc import Callable

from gyre_hpc.schedule.policies.base import (
    Turning,
    awaits_a_join,
    fits_without,
    in_training,
    joining,
    next_cell,
    release_latest_first,
    satellites_back,
    stepping_core,
)
from gyre_hpc.schedule.state import Batch, Cell, State


class Gyre:
    """The elastic policy."""

    def reserved(self, state: State) -> tuple[Cell, ...]:
        """None: every cell starts in rollout."""
        return ()

    def joins(self, state: State, supply: Callable[[State], int]) -> tuple[Cell, ...]:
        """The next cell of the order, if the waterlevel allows it and there is work for it."""
        cell = next_cell(state)
        if cell is None or not fits_without(state, (cell,)) or awaits_a_join(state):
            return ()
        return (cell,) if joining(state) < supply(state) else ()

    def stays(self, state: State, turning: Turning, supply: int) -> tuple[Cell, ...]:
        """The core, after a publication, if the next batch has work and the satellites hold the waterlevel."""
        core = tuple(cell for cell in in_training(state) if cell.id == state.core)
        enough = state.waterlevel + state.evaluating <= satellites_back(state)
        return core if turning is Turning.PUBLISHED and supply > 0 and enough else ()

    def gives_way(self, state: State) -> tuple[Cell, ...]:
        """Latest first, the core last."""
        return release_latest_first(state, stepping_core(state))

    def may_take(self, state: State, batch: Batch) -> bool:
        """Always: training streams."""
        return True
