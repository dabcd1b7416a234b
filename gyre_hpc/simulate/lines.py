"""The metrics lines that a live run would write of what a simulated one did, where they are wanted. Called by simulator.py."""

from __future__ import annotations

from collections.abc import Callable

from gyre_hpc.records import CellId, Version
from gyre_hpc.report import metrics as m
from gyre_hpc.schedule.state import State


class Lines:
    """Appends to `lines`, at the time that `now` says; None: no line is wanted."""

    def __init__(self, lines: list[m.AnyMetric] | None, now: Callable[[], float]) -> None:
        self._lines, self._now = lines, now

    def role(self, cell: CellId, role: str) -> None:
        """The cell has another role, or is lost."""
        self._note(m.RoleChange(self._now(), cell, role))

    def burst(self, index: int, version: Version | None) -> None:
        """The burst is over."""
        self._note(m.Burst(self._now(), index, version))

    def water(self, state: State) -> None:
        """The schedule's ledger; called often."""
        if self._lines is not None:
            running = state.launched - state.terminated
            ledger = (state.waterlevel, running, state.rollout_capacity, state.evaluating)
            self._note(m.Water(self._now(), *ledger, int(state.published)))

    def _note(self, line: m.AnyMetric) -> None:
        if self._lines is not None:
            self._lines.append(line)
