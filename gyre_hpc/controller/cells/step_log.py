"""Puts each step of a role switch down to its switch and has it journaled. Used by `cell_table.py` alone.

A command's serial tells which switch its steps belong to, also when they come late: pages of a cut call are pulled after
the cell has long gone on. A step of a command nobody remembers is logged and dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gyre_hpc.controller.journal.entries import Direction, SwitchStep
from gyre_hpc.records import CellId
from gyre_hpc.transport.messages import DONE, Serial, StepDone, StepName

log = logging.getLogger(__name__)

SERIALS_KEPT: Final = 1024
"""Commands whose late steps are still put down to their switch."""


@dataclass(frozen=True)
class UnderWay:
    """What a cell goes through: `number` counts the switches of this controller, `at` is its start in Unix seconds."""

    number: int
    direction: Direction
    at: float


class StepLog:
    """`journal` is called with every step, in the order in which they are heard of. `clock`: Unix seconds."""

    def __init__(self, journal: Callable[[SwitchStep], None], clock: Callable[[], float]) -> None:
        self._journal, self._clock = journal, clock
        self._switches = 0
        self._commanded: dict[Serial, UnderWay] = {}

    def begin(self, direction: Direction) -> UnderWay:
        """A switch begins."""
        self._switches += 1
        return UnderWay(self._switches, direction, self._clock())

    def commanded(self, serial: Serial, switch: UnderWay | None) -> None:
        """The command of this serial is part of the switch."""
        if switch is not None:
            self._commanded[serial] = switch
            if len(self._commanded) > SERIALS_KEPT:
                del self._commanded[next(iter(self._commanded))]

    def told(self, message: StepDone) -> None:
        """A cell or the gateway has ended a step."""
        switch = self._commanded.get(message.serial)
        if switch is None:
            log.info("cell-%d: step %s of no known switch, dropped", message.cell, message.step)
            return
        self._journal(
            SwitchStep(
                at=self._clock(),
                direction=switch.direction,
                cell=message.cell,
                switch=switch.number,
                step=message.step,
                start=message.start,
                end=message.end,
                bytes=message.bytes,
                pages=message.pages,
                calls=message.calls,
                outcome=message.outcome,
            )
        )

    def own(
        self,
        cell: CellId,
        switch: UnderWay | None,
        step: StepName,
        start: float,
        *,
        calls: int = 0,
        outcome: str = DONE,
    ) -> None:
        """A step of the controller itself ends here; none outside a switch."""
        if switch is None:
            return
        end = self._clock()
        self._journal(
            SwitchStep(
                at=end,
                direction=switch.direction,
                cell=cell,
                switch=switch.number,
                step=step,
                start=start,
                end=end,
                bytes=0,
                pages=0,
                calls=calls,
                outcome=outcome,
            )
        )
