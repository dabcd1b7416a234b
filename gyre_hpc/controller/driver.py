"""The schedule, driven: an event goes in, it is journaled with its decisions, the decisions are carried out.

Events raised while decisions are carried out wait their turn, so `decide` sees one event at a time and the journal has
them in the order in which they counted. `state` is what the schedule knows; nobody else replaces it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gyre_hpc.controller.journal.entries import AnyEntry, Happened
from gyre_hpc.controller.journal.journal import Journal
from gyre_hpc.schedule.machine import decide
from gyre_hpc.schedule.protocol import AnyDecision, AnyEvent
from gyre_hpc.schedule.state import State


@dataclass
class Driver:
    """`changed` is called between journal and decisions, `carry_out` for each decision, `settled` after the last."""

    state: State
    journal: Journal
    changed: Callable[[], None]
    carry_out: Callable[[AnyDecision], None]
    settled: Callable[[], None]
    _events: deque[tuple[AnyEvent, tuple[AnyEntry, ...]]] = field(default_factory=deque)
    _draining: bool = False

    def feed(self, event: AnyEvent, *records: AnyEntry) -> None:
        """Give an event to the schedule. `records` share its journal frame: they count if the event does."""
        self._events.append((event, records))
        if self._draining:
            return
        self._draining = True
        try:
            while self._events:
                self._decide(*self._events.popleft())
        finally:
            self._draining = False

    def _decide(self, event: AnyEvent, records: tuple[AnyEntry, ...]) -> None:
        self.state, decisions = decide(self.state, event)
        self.journal.append(*records, Happened(time.time(), event, decisions))
        self.changed()
        for decision in decisions:
            self.carry_out(decision)
        self.settled()
