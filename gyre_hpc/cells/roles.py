"""The role of a cell: one pure state machine, one function that changes it.

    STARTING -> SWITCHING_TO_ROLLOUT -> ROLLOUT -> SWITCHING_TO_TRAINING -> TRAINING -> SWITCHING_TO_ROLLOUT ...

ROLLOUT goes through SWITCHING_TO_ROLLOUT also for new weights and after the death of its engine. A failed release leaves
the cell BLOCKED, a failed load QUARANTINED: both serve nothing and only end. Any state may end.
"""

from __future__ import annotations

import enum
from typing import Final

from gyre_hpc.errors import IllegalTransition


class CellRole(enum.StrEnum):
    """What a cell does."""

    STARTING = "starting"
    ROLLOUT = "rollout"
    SWITCHING_TO_TRAINING = "switching_to_training"
    TRAINING = "training"
    SWITCHING_TO_ROLLOUT = "switching_to_rollout"
    BLOCKED = "blocked"
    QUARANTINED = "quarantined"
    ENDED = "ended"


_R = CellRole
TRANSITIONS: Final[dict[CellRole, frozenset[CellRole]]] = {
    _R.STARTING: frozenset({_R.SWITCHING_TO_ROLLOUT, _R.ENDED}),
    _R.ROLLOUT: frozenset({_R.SWITCHING_TO_ROLLOUT, _R.SWITCHING_TO_TRAINING, _R.ENDED}),
    _R.SWITCHING_TO_TRAINING: frozenset({_R.TRAINING, _R.BLOCKED, _R.QUARANTINED, _R.ENDED}),
    _R.TRAINING: frozenset({_R.SWITCHING_TO_ROLLOUT, _R.QUARANTINED, _R.ENDED}),
    _R.SWITCHING_TO_ROLLOUT: frozenset({_R.ROLLOUT, _R.QUARANTINED, _R.ENDED}),
    _R.BLOCKED: frozenset({_R.ENDED}),
    _R.QUARANTINED: frozenset({_R.ENDED}),
    _R.ENDED: frozenset(),
}


class RoleMachine:
    """The current role of one cell."""

    def __init__(self) -> None:
        self._role = CellRole.STARTING

    @property
    def role(self) -> CellRole:
        return self._role

    def to(self, role: CellRole) -> None:
        """Change the role. Raises IllegalTransition naming both."""
        if role not in TRANSITIONS[self._role]:
            raise IllegalTransition(
                f"a cell in {self._role} cannot go to {role}", fix="restart the cell; its claims return"
            )
        self._role = role

    def require(self, *allowed: CellRole, action: str) -> None:
        """Raises IllegalTransition unless the cell is in one of these roles."""
        if self._role not in allowed:
            raise IllegalTransition(
                f"a cell in {self._role} cannot {action}; it must be in {' or '.join(allowed)}"
            )
