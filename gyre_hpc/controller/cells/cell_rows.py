"""One row per cell of `cell_table.py`, and what the table asks of its owner. Plain data; the table alone changes a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gyre_hpc.controller.cells.phases import Phase
from gyre_hpc.controller.cells.step_log import UnderWay
from gyre_hpc.controller.journal.entries import SwitchStep
from gyre_hpc.records import CellId, Version
from gyre_hpc.schedule.protocol import AnyEvent, CellKind
from gyre_hpc.transport.messages import CellSwitched, Manifest, Message, Serial

NOTHING_LOADED = Version(-1)
NEVER = Serial(-1)


@dataclass
class Cell:
    """One cell. `address` is its engine's URL; `version` what its engine confirmed last; `known` to the schedule."""

    id: CellId
    capacity: int
    phase: Phase = Phase.STARTING
    address: str = ""
    port: str = ""
    """Address of its page port."""
    version: Version = NOTHING_LOADED
    known: bool = True
    announced: bool = False
    """Whether the schedule has been told that this incarnation exists."""
    engine_dead: bool = False
    """Its leader said so; true until it serves again."""
    doubts: int = 0
    """How often the gateway could not use its engine since it last loaded weights."""
    counted_out: bool = False
    """Whether the schedule has been told that it is unroutable, and not yet that it serves."""
    switch: Serial = NEVER
    """The newest BecomeEngine or BecomeTrainer."""
    told: Manifest | None = None
    """The weights of the newest BecomeEngine."""
    route: Serial = NEVER
    """The newest Route or Unroute."""
    kind: CellKind = CellKind.OWN
    departing: bool = False
    """A guest that leaves for good: it takes up no work."""
    deserted: bool = False
    """Departing, and the gateway has moved its calls."""
    under_way: UnderWay | None = None
    """The switch it is in; None when it serves or trains."""
    reason: str = ""
    """Why it is BLOCKED or QUARANTINED."""
    gone: bool = False
    """A guest that never comes back: the row answers late messages and counts nowhere."""

    @property
    def weights(self) -> str:
        """Digest of what its engine confirmed last; "" where that is not what it was told last."""
        return self.told.content if self.told is not None and self.told.version == self.version else ""


@dataclass(frozen=True)
class CellHooks:
    """What the table asks of its owner."""

    cell: Callable[[CellId, Message], None]
    gateway: Callable[[Message], None]
    feed: Callable[[AnyEvent], None]
    moved: Callable[[Cell, Phase], None]
    """(cell, previous phase): for timeline and logs."""
    switched: Callable[[Cell, CellSwitched], None]
    """A switch that was waited for has ended; its phase changes next."""
    clock: Callable[[], float]
    """Unix seconds: when steps began and ended."""
    step: Callable[[SwitchStep], None] = lambda step: None
    """A step of a switch has ended: to be journaled."""
    place: Callable[[CellId], int] = lambda cell: 0
    """The cell's place in the order in which cells leave rollout."""
