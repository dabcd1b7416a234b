"""One call of `decide` under way: the state as it stands and the decisions so far.

Rules are functions of a Turn. They replace parts of the frozen state through it and emit decisions in the order in which
the caller must carry them out. Cells and groups are set here only, because C_R, `pending` and `ready` follow from them.
A Turn never outlives the call. (A mutable state with a deep copy per event was the other way: it costs more and lets a rule
change what the caller still reads.)
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from msgspec.structs import replace

from gyre_hpc.records import CellId, GroupId
from gyre_hpc.schedule.protocol import AnyDecision
from gyre_hpc.schedule.state import Batch, Cell, CellRole, Group, GroupStatus, State, serves


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
        cells = [cell if old.id == cell.id else old for old in self.state.cells]
        self.set_order(tuple(cells), self.state.reserved)

    def set_order(self, cells: tuple[Cell, ...], reserved: tuple[CellId, ...]) -> None:
        """Replace the cells, and which of them are reserved."""
        serving = [cell.capacity for cell in cells if serves(cell) and cell.id not in reserved]
        capacity = self.state.settings.pool + sum(serving)
        self.update(cells=cells, reserved=reserved, rollout_capacity=capacity)

    def unreserve(self, *cells: CellId) -> None:
        """These cells are bound for training no longer."""
        left = tuple(id_ for id_ in self.state.reserved if id_ not in cells)
        if left != self.state.reserved:
            self.set_order(self.state.cells, left)

    def set_groups(self, *groups: Group) -> None:
        """Insert or replace groups."""
        known = self.state.groups
        before = [known[group.id] for group in groups if group.id in known]
        self._regroup(known | {group.id: group for group in groups}, before, groups)

    def set_status(self, groups: tuple[Group, ...], status: GroupStatus) -> None:
        """Give all these groups a status."""
        self.set_groups(*[replace(group, status=status) for group in groups])

    def drop_groups(self, groups: Iterable[Group]) -> None:
        """Nothing can call for these groups again."""
        gone = {group.id: group for group in groups}
        kept = {id_: group for id_, group in self.state.groups.items() if id_ not in gone}
        self._regroup(kept, gone.values(), ())

    def _regroup(self, groups: dict[GroupId, Group], before: Iterable[Group], after: Iterable[Group]) -> None:
        """Replace the groups, and keep `pending` and `ready` in line with those that were `before` and are `after`."""
        pending, ready = self.state.pending.copy(), list(self.state.ready)
        for group in before:
            if group.status is GroupStatus.PENDING:
                pending[group.version] -= 1
            elif group.status is GroupStatus.READY:
                ready.remove(group.id)
        for group in after:
            if group.status is GroupStatus.PENDING:
                pending[group.version] = pending.get(group.version, 0) + 1
            elif group.status is GroupStatus.READY:
                insort(ready, group.id, key=lambda id_: (groups[id_].version, groups[id_].rank))
        counts = {stamp: count for stamp, count in pending.items() if count}
        self.update(groups=groups, pending=counts, ready=tuple(ready))

    def set_batch(self, batch: Batch, **changes: object) -> Batch:
        """Replace the open batch, with changes; returns it."""
        changed = replace(batch, **changes)
        self.update(open_batch=changed)
        return changed
