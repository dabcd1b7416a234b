"""One call of `decide` under way: the state as it stands and the decisions so far.

Rules are functions of a Turn. They replace parts of the frozen state through it and emit decisions in the order in which
the caller must carry them out. A Turn never outlives the call. (A mutable state with a deep copy per event was the other
way: it costs more and lets a rule change what the caller still reads.)
"""

from __future__ import annotations

from msgspec.structs import replace

from gyre_hpc.schedule.protocol import AnyDecision
from gyre_hpc.schedule.state import Batch, Cell, CellRole, Group, GroupStatus, State


class Turn:
    """Working copy of one `decide`."""

    __slots__ = ("decisions", "state")

    def __init__(self, state: State) -> None:
        self.state = state
        self.decisions: list[AnyDecision] = []

    def emit(self, decision: AnyDecision) -> None:
        """Add a decision."""
        self.decisions.append(decision)

    def update(self, **changes: object) -> None:
        """Replace fields of the state."""
        self.state = replace(self.state, **changes)

    def set_role(self, cell: Cell, role: CellRole, *, routable: bool | None = None) -> None:
        """Give the cell a role, and a routability if named."""
        fit = cell.routable if routable is None else routable
        self.set_cell(replace(cell, role=role, routable=fit))

    def set_cell(self, cell: Cell) -> None:
        """Replace the live cell with the same id."""
        self.update(cells=tuple(cell if old.id == cell.id else old for old in self.state.cells))

    def set_groups(self, *groups: Group) -> None:
        """Insert or replace groups."""
        self.update(groups=self.state.groups | {group.id: group for group in groups})

    def set_status(self, groups: tuple[Group, ...], status: GroupStatus) -> None:
        """Give all these groups a status."""
        self.set_groups(*(replace(group, status=status) for group in groups))

    def set_batch(self, batch: Batch, **changes: object) -> Batch:
        """Replace the open batch, with changes; returns it."""
        changed = replace(batch, **changes)
        self.update(open_batch=changed)
        return changed
