"""What is going to happen and when. Things planned for the same moment happen in the order in which they were planned.

A plan may depend on a life (of a cell, of the core, of the job): when that ends first, the planned thing never happens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable

NEVER = float("inf")
Action = Callable[[], None]


class Agenda:
    """A clock and a heap. `now` is in seconds since the start of the run; whoever lets time pass sets it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._ties = 0
        self._lives: dict[Hashable, int] = {}

    @property
    def next(self) -> float:
        """When the next thing happens."""
        return self._heap[0][0] if self._heap else NEVER

    def at(self, when: float, action: Action) -> None:
        """At that time, not before."""
        self._ties += 1
        heapq.heappush(self._heap, (when, self._ties, action))

    def after(self, seconds: float, action: Action, life: Hashable = None) -> None:
        """Later, or at once; never if `life` ends before."""
        if seconds <= 0:
            action()
        elif life is None:
            self.at(self.now + seconds, action)
        else:
            count = self._lives.setdefault(life, 0)
            self.at(self.now + seconds, lambda: action() if self._lives[life] == count else None)

    def end(self, life: Hashable) -> None:
        """Nothing planned for this life so far happens any more."""
        self._lives[life] = self._lives.get(life, 0) + 1

    def run_due(self) -> None:
        """Do everything planned until now."""
        while self._heap and self._heap[0][0] <= self.now:
            heapq.heappop(self._heap)[2]()
