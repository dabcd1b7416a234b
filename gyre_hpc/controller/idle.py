"""Device time by role and cause, sampled by the controller.

A rollout cell is busy while calls run on it; a training cell while it holds a claim or commits a batch. Everything
else is idle, with a cause: `switching`, `tools` (executions run, none of them waits for this cell), `no_work` (nothing
to launch), `no_micro_steps`, `down`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre_hpc.controller.cell_table import Phase
from gyre_hpc.records import CellId

SWITCHING = frozenset({Phase.LEAVING, Phase.JOINING, Phase.RETURNING, Phase.RELOADING, Phase.LOADING})
GONE = frozenset({Phase.STARTING, Phase.IDLE, Phase.LOST, Phase.DOWN})


def role_and_cause(phase: Phase, *, running: int, executing: int, training_busy: bool) -> tuple[str, str]:
    """(role, cause of idleness or "" when busy) of a cell in `phase` with `running` calls on it."""
    if phase in SWITCHING:
        return "switching", "switching"
    if phase in GONE:
        return "down", "down"
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
