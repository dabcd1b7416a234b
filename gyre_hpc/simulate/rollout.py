"""Running executions on a shared clock of progress: an execution that needs x seconds undisturbed ends when the clock has
advanced by x since its launch. The clock runs at the engine model's pace, so a change of load or capacity costs nothing
per execution.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from gyre_hpc.records import ExecutionId
from gyre_hpc.simulate.world import EngineModel

NEVER = float("inf")


class Rollout:
    """Executions under way. Times in seconds since the start of the run."""

    def __init__(self, engine: EngineModel, limit_s: float) -> None:
        self._engine = engine
        self._limit_s = limit_s
        self._ends: list[tuple[float, ExecutionId]] = []
        """(progress clock, execution): when it is complete."""
        self._limits: list[tuple[float, ExecutionId]] = []
        """(wall clock, execution): when its time limit cuts it."""
        self._running: dict[ExecutionId, float] = {}
        """Progress clock at the end of each running execution."""
        self._progress = 0.0
        self._pace = 1.0
        self._capacity = 0

    @property
    def running(self) -> int:
        return len(self._running)

    def launch(self, execution: ExecutionId, seconds: float, now: float) -> None:
        """It starts and needs `seconds` undisturbed."""
        end = self._progress + seconds
        self._running[execution] = end
        heapq.heappush(self._ends, (end, execution))
        if self._limit_s < NEVER:
            heapq.heappush(self._limits, (now + self._limit_s, execution))

    def cancel(self, execution: ExecutionId) -> bool:
        """End it now; whether it was running."""
        return self._running.pop(execution, None) is not None

    def restart(self, seconds: dict[ExecutionId, float], now: float) -> None:
        """All running executions were interrupted and begin again."""
        again = list(self._running)
        self._running.clear()
        self._ends.clear()
        self._limits.clear()
        for execution in again:
            self.launch(execution, seconds[execution], now)

    def delay(self, share: float, seconds: float) -> None:
        """This share of the running executions (the oldest ids) must repeat `seconds` of progress."""
        if not seconds:
            return
        for execution in sorted(self._running)[: round(share * len(self._running))]:
            self._running[execution] += seconds
            heapq.heappush(self._ends, (self._running[execution], execution))

    def settle(self, capacity: int) -> None:
        """The load or the capacity has changed: the clock has a new pace."""
        self._capacity = capacity
        self._pace = self._engine.pace(len(self._running), capacity)

    def advance(self, seconds: float) -> None:
        """Let time pass at the present pace."""
        self._progress += seconds * self._pace

    def next_end(self, now: float) -> float:
        """When the next execution ends if nothing changes."""
        ends, running = self._ends, self._running
        while ends and running.get(ends[0][1]) != ends[0][0]:
            heapq.heappop(ends)
        end = now + max(0.0, ends[0][0] - self._progress) / self._pace if ends and self._pace else NEVER
        limits = self._limits
        while limits and limits[0][1] not in running:
            heapq.heappop(limits)
        return min(end, limits[0][0]) if limits else end

    def pop_ended(self, now: float) -> Iterator[tuple[ExecutionId, bool]]:
        """(execution, whether its time limit cut it) of each that has ended by now."""
        ends, running = self._ends, self._running
        reach = self._progress + 1e-9 * max(1.0, self._progress)
        while ends and ends[0][0] <= reach:
            end, execution = heapq.heappop(ends)
            if running.get(execution) == end:
                del running[execution]
                yield execution, False
        while self._limits and self._limits[0][0] <= now:
            _, execution = heapq.heappop(self._limits)
            if running.pop(execution, None) is not None:
                yield execution, True
