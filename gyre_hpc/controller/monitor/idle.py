"""Device time by role and cause, sampled by the controller.

A rollout cell is busy while calls run on it; a training cell while it holds a claim or commits a batch. Everything
else is idle, with a cause: `tools` (executions run, none of them waits for this cell), `no_work` (nothing to launch),
`no_micro_steps`, `switching` (roles), `loading` (weights: start, publication), `starting`, `down`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre_hpc.controller.cells.phases import Phase
from gyre_hpc.records import CellId

NEVER_BUSY = {
    Phase.LEAVING: ("switching", "switching"),
    Phase.JOINING: ("switching", "switching"),
    Phase.RETURNING: ("switching", "switching"),
    Phase.RELOADING: ("switching", "loading"),
    Phase.LOADING: ("switching", "loading"),
    Phase.STARTING: ("down", "starting"),
    Phase.IDLE: ("down", "starting"),
    Phase.LOST: ("down", "down"),
    Phase.DOWN: ("down", "down"),
    Phase.BLOCKED: ("down", "down"),
    Phase.QUARANTINED: ("down", "down"),
}
"""(role, cause) of the phases in which a cell can do nothing."""


def role_and_cause(phase: Phase, *, running: int, executing: int, training_busy: bool) -> tuple[str, str]:
    """(role, cause of idleness or "" when busy) of a cell in `phase` with `running` calls on it."""
    if phase in NEVER_BUSY:
        return NEVER_BUSY[phase]
    if phase is Phase.TRAINING:
        return "training", "" if training_busy else "no_micro_steps"
    if running:
        return "rollout", ""
    return "rollout", "tools" if executing else "no_work"


@dataclass
class IdleMeter:
    """Sums samples between two flushes: (cell, role, cause) -> seconds."""

    _sums: dict[tuple[CellId, str, str], float] = field(default_factory=dict)

    def sample(self, cell: CellId, role: str, cause: str, seconds: float) -> None:
        key = (cell, role, cause)
        self._sums[key] = self._sums.get(key, 0.0) + seconds

    def flush(self) -> list[tuple[CellId, str, str, float]]:
        """All sums since the last flush, in order."""
        rows = [(cell, role, cause, seconds) for (cell, role, cause), seconds in sorted(self._sums.items())]
        self._sums = {}
        return rows
