"""The claims ledger of the open batch: each micro-step is unclaimed, claimed by one cell, or done (provisionally).

Pure. A claim lives as long as its cell: losing the cell returns all its claims, done ones included, because a gradient
enters the sum only with the cell's one committed contribution. A micro-step whose region could not be pulled is unclaimed
and withheld until it is published at another place. Oldest version first, then the largest, so that the last ones are small
and cells finish together; then order of arrival.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from gyre_hpc.errors import ProtocolViolation
from gyre_hpc.records import CellId, GroupId
from gyre_hpc.transport.messages import MicroStepRef


class Contradiction(ProtocolViolation):
    """What a peer says cannot be true of what the controller has asked of it: the peer is restarted, the run goes on."""


@dataclass
class ClaimsLedger:
    """Claims of batch `batch`. Counts obey: unclaimed + open + done = all micro-steps of the batch's groups."""

    batch: int
    groups: set[GroupId] = field(default_factory=set)
    _refs: dict[str, MicroStepRef] = field(default_factory=dict)
    _queue: list[tuple[int, int, int, str]] = field(default_factory=list)
    _claimed: dict[str, CellId] = field(default_factory=dict)
    _done: dict[CellId, list[str]] = field(default_factory=dict)
    _withheld: set[str] = field(default_factory=set)
    _arrivals: int = 0
    first_claim_taken: bool = False

    def __len__(self) -> int:
        """Micro-steps of the batch."""
        return len(self._refs)

    @property
    def unclaimed(self) -> int:
        return len(self._queue) + len(self._withheld)

    @property
    def claimable(self) -> bool:
        return bool(self._queue)

    @property
    def open(self) -> int:
        return len(self._claimed)

    @property
    def claims(self) -> tuple[tuple[str, CellId], ...]:
        """(micro-step, cell) of the claims that are not done."""
        return tuple(self._claimed.items())

    def add_group(self, group: GroupId, refs: tuple[MicroStepRef, ...]) -> None:
        """A group entered the batch."""
        if group in self.groups:
            return
        self.groups.add(group)
        for ref in refs:
            self._refs[ref.id] = ref
            self._push(ref)

    def replace_refs(self, refs: tuple[MicroStepRef, ...]) -> None:
        """The processor publishes the same micro-steps again, at other places: withheld ones may be claimed."""
        for ref in refs:
            if ref.id in self._refs:
                moved = ref.manifest != self._refs[ref.id].manifest
                self._refs[ref.id] = ref
                if moved and ref.id in self._withheld:
                    self._withheld.discard(ref.id)
                    self._push(ref)

    def withhold(self, cell: CellId, name: str) -> MicroStepRef:
        """`cell` could not pull what it claimed. Raises Contradiction if it does not hold the claim."""
        self._check_claim(cell, name)
        del self._claimed[name]
        self._withheld.add(name)
        return self._refs[name]

    def _push(self, ref: MicroStepRef) -> None:
        self._arrivals += 1
        heapq.heappush(self._queue, (ref.version, -ref.tokens, self._arrivals, ref.id))

    def claim(self, cell: CellId) -> MicroStepRef | None:
        """Give the largest of the oldest unclaimed micro-steps to `cell`, or None when there is none."""
        if not self._queue:
            return None
        *_, name = heapq.heappop(self._queue)
        self._claimed[name] = cell
        self.first_claim_taken = True
        return self._refs[name]

    def done(self, cell: CellId, name: str) -> None:
        """`cell` has accumulated the micro-step. Raises Contradiction if it does not hold the claim."""
        self._check_claim(cell, name)
        del self._claimed[name]
        self._done.setdefault(cell, []).append(name)

    def _check_claim(self, cell: CellId, name: str) -> None:
        if self._claimed.get(name) != cell:
            raise Contradiction(
                f"cell {cell} reports micro-step {name} of batch {self.batch} without a claim"
            )

    def done_by(self, cell: CellId) -> tuple[str, ...]:
        """Micro-steps in the cell's accumulator, in the order of accumulation."""
        return tuple(self._done.get(cell, ()))

    def holds(self, cell: CellId) -> bool:
        """Whether the cell has a claim that is not done."""
        return cell in self._claimed.values()

    def workers(self) -> tuple[CellId, ...]:
        """Cells with done micro-steps, in cell order."""
        return tuple(sorted(cell for cell, names in self._done.items() if names))

    def return_claims(self, cell: CellId) -> int:
        """The cell is gone: everything it claimed or did is unclaimed again. Returns how many."""
        names = [name for name, owner in self._claimed.items() if owner == cell] + self._done.pop(cell, [])
        for name in names:
            self._claimed.pop(name, None)
            self._push(self._refs[name])
        return len(names)

    def owners(self) -> tuple[tuple[CellId, tuple[str, ...]], ...]:
        """(cell, its micro-steps in order) in cell order: the owner map of the step record."""
        return tuple((cell, self.done_by(cell)) for cell in self.workers())
