"""Running executions on a shared clock of progress: an execution that needs x seconds undisturbed ends when the clock has
advanced by x since its launch. The clock runs at the engine model's pace, so a change of load or capacity costs nothing
per execution. Time limits stand on a second clock, which stops while no cell serves: that time is not the harness's.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from gyre_hpc.records import ExecutionId
from gyre_hpc.simulate.agenda import NEVER
from gyre_hpc.simulate.world import EngineModel


class Rollout:
    """Executions under way. Times in seconds since the start of the run."""

    def __init__(self, engine: EngineModel, limit_s: float) -> None:
        self._engine = engine
        self._limit_s = limit_s
        self._ends: list[tuple[float, ExecutionId]] = []
        """(progress clock, execution): when it is complete."""
        self._limits: deque[tuple[float, float, ExecutionId]] = deque()
        """(harness clock, progress clock at its launch, execution): when its time limit cuts it, in order of launch."""
        self._running: dict[ExecutionId, tuple[float, float]] = {}
        """(progress clock at the end, at the launch) of each running execution."""
        self._progress = 0.0
        self._harness = 0.0
        self._pace = 0.0

    @property
    def running(self) -> int:
        """Executions under way."""
        return len(self._running)

    def launch(self, execution: ExecutionId, seconds: float) -> None:
        """It starts and needs `seconds` undisturbed."""
        end = self._progress + seconds
        self._running[execution] = (end, self._progress)
        heapq.heappush(self._ends, (end, execution))
        if self._limit_s < NEVER:
            self._limits.append((self._harness + self._limit_s, self._progress, execution))

    def cancel(self, execution: ExecutionId) -> None:
        """End it now, if it runs."""
        self._running.pop(execution, None)

    def interrupt(self) -> None:
        """Nothing runs any more; what did has to start afresh."""
        self._running.clear()
        self._ends.clear()
        self._limits.clear()

    def repeat(self, share: float, seconds: float) -> None:
        """This share of the running executions (the oldest ids) must make `seconds` of progress once more."""
        if not seconds:
            return
        for execution in sorted(self._running)[: round(share * len(self._running))]:
            end, begin = self._running[execution]
            self._running[execution] = (end + seconds, begin)
            heapq.heappush(self._ends, (end + seconds, execution))

    def settle(self, capacity: int) -> None:
        """The load or the capacity has changed: the clock has a new pace."""
        self._pace = self._engine.pace(len(self._running), capacity)

    def advance(self, seconds: float) -> None:
        """Let time pass at the present pace."""
        self._progress += seconds * self._pace
        if self._pace:
            self._harness += seconds

    def next_end(self, now: float) -> float:
        """When the next execution ends if nothing changes."""
        if not self._pace:
            return NEVER
        ends, limits, running = self._ends, self._limits, self._running
        while ends and running.get(ends[0][1], (NEVER,))[0] != ends[0][0]:
            heapq.heappop(ends)
        while limits and running.get(limits[0][2], (0.0, NEVER))[1] != limits[0][1]:
            limits.popleft()
        end = now + max(0.0, ends[0][0] - self._progress) / self._pace if ends else NEVER
        return min(end, now + max(0.0, limits[0][0] - self._harness)) if limits else end

    def pop_ended(self, now: float) -> Iterator[tuple[ExecutionId, bool]]:
        """(execution, whether its time limit cut it) of each that has ended by now, but for rounding."""
        rounding = 1e-9 * max(1.0, now, self._progress)
        ends, limits, running = self._ends, self._limits, self._running
        reach = self._progress + rounding
        while ends and ends[0][0] <= reach:
            end, execution = heapq.heappop(ends)
            if execution in running and running[execution][0] == end:
                del running[execution]
                yield execution, False
        reach = self._harness + rounding
        while limits and limits[0][0] <= reach:
            _, begin, execution = limits.popleft()
            if execution in running and running[execution][1] == begin:
                del running[execution]
                yield execution, True
