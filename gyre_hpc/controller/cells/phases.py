"""Where a cell is between roles, as the controller sees it, and the transitions there are.

STARTING -> IDLE -> LOADING -> ROLLOUT -> LEAVING -> JOINING -> TRAINING -> RETURNING -> ROLLOUT
                                 ROLLOUT -> RELOADING (publication) -> LOADING -> ROLLOUT
                                 ROLLOUT <-> DOWN (engine died, suspect)          any -> LOST
                                 RELOADING -> ROLLOUT (publication that keeps calls)
JOINING -> BLOCKED (a release failed), JOINING, LOADING, RETURNING, RELOADING, DOWN -> QUARANTINED (a load failed): the cell only ends
"""

from __future__ import annotations

import enum


class Phase(enum.StrEnum):
    """Where a cell is between roles."""

    STARTING = "starting"
    IDLE = "idle"
    LOADING = "loading"
    ROLLOUT = "rollout"
    DOWN = "down"
    RELOADING = "reloading"
    LEAVING = "leaving"
    JOINING = "joining"
    TRAINING = "training"
    RETURNING = "returning"
    BLOCKED = "blocked"
    QUARANTINED = "quarantined"
    LOST = "lost"


P = Phase
TRANSITIONS: frozenset[tuple[Phase, Phase]] = frozenset(
    {
        (P.STARTING, P.IDLE),
        (P.IDLE, P.LOADING),
        (P.LOADING, P.LOADING),
        (P.LOADING, P.ROLLOUT),
        (P.LOADING, P.DOWN),
        (P.ROLLOUT, P.DOWN),
        (P.DOWN, P.ROLLOUT),
        (P.DOWN, P.LOADING),
        (P.ROLLOUT, P.RELOADING),
        (P.RELOADING, P.LOADING),
        (P.ROLLOUT, P.LEAVING),
        (P.DOWN, P.LEAVING),
        (P.LEAVING, P.JOINING),
        (P.JOINING, P.TRAINING),
        (P.TRAINING, P.RETURNING),
        (P.JOINING, P.RETURNING),
        (P.RETURNING, P.ROLLOUT),
        (P.RETURNING, P.DOWN),
        (P.RETURNING, P.LOADING),
        (P.LOST, P.STARTING),
        (P.RELOADING, P.ROLLOUT),
        (P.JOINING, P.BLOCKED),
        (P.JOINING, P.QUARANTINED),
        (P.LOADING, P.QUARANTINED),
        (P.RETURNING, P.QUARANTINED),
        (P.RELOADING, P.QUARANTINED),
        (P.DOWN, P.QUARANTINED),
        (P.ROLLOUT, P.QUARANTINED),
    }
)
