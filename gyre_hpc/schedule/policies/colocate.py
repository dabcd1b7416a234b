"""colocate: the whole pool switches as one (HybridFlow, ReaL), with the same dispatch and staleness rules.

All cells that train leave rollout together once nothing needs them there: w + e <= C_R without any of them (0 without a
standalone pool or guests that only serve). Without `streaming` the burst's groups must all be ready before the first is taken.
"""

from __future__ import annotations

from collections.abc import Callable

from gyre_hpc.schedule.policies.base import (
    Turning,
    fits_without,
    in_training,
    is_short,
    stepping_core,
    whole_burst_ready,
)
from gyre_hpc.schedule.state import IN_TRAINING, Batch, Cell, State, serves


class Colocate:
    """Whole-pool switch."""

    def reserved(self, state: State) -> tuple[Cell, ...]:
        """None: the pool starts in rollout."""
        return ()

    def joins(self, state: State, supply: Callable[[State], int]) -> tuple[Cell, ...]:
        """Every cell that does not train yet, or none."""
        rest = tuple(cell for cell in state.cells if cell.trains and cell.role not in IN_TRAINING)
        together = all(serves(cell) for cell in rest) and fits_without(state, rest)
        return rest if together and supply(state) > 0 else ()

    def stays(self, state: State, turning: Turning, supply: int) -> tuple[Cell, ...]:
        """All or none: all if the next batch has work and the standalone pool holds the waterlevel."""
        enough = state.waterlevel + state.evaluating <= state.rollout_capacity
        return in_training(state) if turning is Turning.PUBLISHED and supply > 0 and enough else ()

    def gives_way(self, state: State) -> tuple[Cell, ...]:
        """The whole pool, the core last."""
        if not is_short(state):
            return ()
        core = stepping_core(state)
        return tuple(cell for cell in reversed(in_training(state)) if core is None or cell.id != core.id)

    def may_take(self, state: State, batch: Batch) -> bool:
        """At once when streaming, else when the whole burst is ready."""
        return state.settings.streaming or whole_burst_ready(state, batch)
