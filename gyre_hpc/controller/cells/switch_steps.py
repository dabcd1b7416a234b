"""Steps of role switches and publications as the journal keeps them, and what a reader makes of them.

A *switch* is what a cell goes through in one direction, numbered by its controller; it ends with `join` (the schedule counts
the cell as training) or `route` (calls may go to it). One without such an end was cut short: by the loss of the cell (its
last step is `lost`, with the reason) or by the end of the controller (an entry Resumed follows). A switch outlives neither:
what it had done is void, and the cell's next incarnation begins from its start.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gyre_hpc.controller.journal.entries import AnyEntry, Direction, Resumed, SwitchStep
from gyre_hpc.controller.journal.journal import read_journal
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CellId
from gyre_hpc.transport.messages import StepName

LAST: Final = frozenset({StepName.JOIN, StepName.ROUTE})
"""Steps that end a switch well."""


class SwitchEnd(enum.StrEnum):
    """How a switch ended."""

    DONE = "done"
    LOST = "lost"
    INTERRUPTED = "interrupted"
    """Its controller ended."""
    OPEN = "open"


@dataclass
class Switch:
    """One switch of one cell, as journaled."""

    cell: CellId
    direction: Direction
    steps: list[SwitchStep] = field(default_factory=list)
    end: SwitchEnd = SwitchEnd.OPEN

    @property
    def seconds(self) -> float:
        """From the start of its first step to the end of its last."""
        return max(step.end for step in self.steps) - min(step.start for step in self.steps)


def switches(entries: Iterable[AnyEntry]) -> list[Switch]:
    """All switches of a journal, in the order of their first steps."""
    found: list[Switch] = []
    known: dict[int, Switch] = {}
    for entry in entries:
        if isinstance(entry, Resumed):
            for switch in known.values():
                if switch.end is SwitchEnd.OPEN:
                    switch.end = SwitchEnd.INTERRUPTED
            known.clear()
        elif isinstance(entry, SwitchStep):
            if entry.switch not in known:
                known[entry.switch] = Switch(entry.cell, entry.direction)
                found.append(known[entry.switch])
            switch = known[entry.switch]
            switch.steps.append(entry)
            if entry.step in LAST:
                switch.end = SwitchEnd.DONE
            elif entry.step is StepName.LOST:
                switch.end = SwitchEnd.LOST
    return found


def read_switches(run: Path) -> list[Switch]:
    """All switches of a run folder. Raises CorruptRecord."""
    return switches(read_journal(RunLayout(run).journal))
