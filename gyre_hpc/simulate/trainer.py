"""The open batch's work and the cells that do it.

`Claims` keeps every claim, as a run does; `Fluid` is its limit for ever smaller micro-steps and costs nothing per
micro-step. Both know what the schedule must hear: nothing can be claimed (`unclaimed`), nothing is under way (`open`). Work
is in node-seconds, times in seconds since the start of the run; what a lost cell did is to be done again.
"""

from __future__ import annotations

import heapq
import math
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from gyre_hpc.records import CellId
from gyre_hpc.simulate.world import TrainingModel

NOTHING = 1e-12


class Work(ABC):
    """Work of one batch at a time. `busy`: node-seconds that cells have spent on it, in vain or not."""

    def __init__(self, model: TrainingModel) -> None:
        self.fill_s = model.fill_s
        self.unclaimed = 0
        self.open = 0
        self.busy = 0.0

    @abstractmethod
    def begin(self) -> None:
        """Another batch is open; work of the one before is void."""

    @abstractmethod
    def add(self, now: float, work: float, micro_steps: int) -> None:
        """The batch takes a group. Nothing to do if it has no micro-step."""

    @abstractmethod
    def train(self, now: float, nodes: Mapping[CellId, float]) -> None:
        """These cells may claim from now on, in order; claims of all others return."""

    @abstractmethod
    def run(self, now: float, then: float) -> float:
        """Train on; the time reached: `then`, or earlier when nothing is left to claim or under way."""

    @abstractmethod
    def lose(self, now: float, cell: CellId) -> None:
        """Whatever the cell did for this batch is unclaimed again."""

    @abstractmethod
    def micro_steps(self, work: float, given: int, least: int) -> int:
        """Micro-steps of a group with this work: `given` if known, 0 without work."""


class Claim(NamedTuple):
    """A micro-step under way on a cell of so many nodes."""

    begin: float
    end: float
    work: float
    nodes: float


class Fluid(Work):
    """Cells share the work in proportion to their nodes. `unclaimed` keeps the number of micro-steps until the end."""

    def __init__(self, model: TrainingModel) -> None:
        super().__init__(model)
        self._left = 0.0
        self._total = 0
        self._nodes: Mapping[CellId, float] = {}
        self._rate = 0.0
        self._done: dict[CellId, float] = {}
        self._drained_at = math.inf
        self._fill_left = 0.0
        """Seconds the pipeline has still to be filled for in this batch: once, as each cell of `Claims` does."""

    def begin(self) -> None:
        self._left, self._total, self._done, self._drained_at = 0.0, 0, {}, math.inf
        self._fill_left = self.fill_s
        self.unclaimed = self.open = 0

    def add(self, now: float, work: float, micro_steps: int) -> None:
        if micro_steps:
            self._total += micro_steps
            self._return(now, work)

    def train(self, now: float, nodes: Mapping[CellId, float]) -> None:
        self._nodes = nodes
        self._rate = sum(nodes.values())

    def run(self, now: float, then: float) -> float:
        if self._left and self._rate:
            end = now + self._left / self._rate
            if end > then:
                self._spend(then - now)
                self._left = max(self._left - (then - now) * self._rate, sys.float_info.min)
                return then
            self._spend(end - now)
            self._left, self.unclaimed = 0.0, 0
            self.open = min(self._total, len(self._nodes)) if self._fill_left else 0
            self._drained_at = end + self._fill_left
            return end
        if self._drained_at <= then:
            drained, self._drained_at, self.open = max(now, self._drained_at), math.inf, 0
            self._fill_left = 0.0
            return drained
        return then

    def lose(self, now: float, cell: CellId) -> None:
        work = self._done.pop(cell, 0.0)
        if work:
            self._return(now, work)

    def micro_steps(self, work: float, given: int, least: int) -> int:
        return (given or least) if work > 0 else 0

    def _return(self, now: float, work: float) -> None:
        if self._drained_at < math.inf:
            self._fill_left = max(self._drained_at - now, 0.0)
        self._left += work
        self.unclaimed, self.open, self._drained_at = self._total, 0, math.inf

    def _spend(self, seconds: float) -> None:
        self.busy += seconds * self._rate
        for cell, nodes in self._nodes.items():
            self._done[cell] = self._done.get(cell, 0.0) + seconds * nodes


class Claims(Work):
    """Every cell holds one micro-step at a time and claims the next when it is done, oldest first."""

    def __init__(self, model: TrainingModel, mean_nodes: float) -> None:
        super().__init__(model)
        self._size = model.micro_step_s * mean_nodes
        self._queue: deque[float] = deque()
        self._nodes: Mapping[CellId, float] = {}
        self._held: dict[CellId, Claim] = {}
        self._done: dict[CellId, list[float]] = {}
        self._ends: list[tuple[float, CellId]] = []

    def begin(self) -> None:
        self._queue.clear()
        self._held, self._done, self._ends = {}, {}, []
        self.unclaimed = self.open = 0

    def add(self, now: float, work: float, micro_steps: int) -> None:
        self._queue.extend([work / micro_steps] * micro_steps if micro_steps else ())
        self._claim_all(now)

    def train(self, now: float, nodes: Mapping[CellId, float]) -> None:
        self._nodes = nodes
        for cell in [cell for cell in self._held if cell not in nodes]:
            self._drop_claim(now, cell)
        self._claim_all(now)

    def run(self, now: float, then: float) -> float:
        while self._ends and self._ends[0][0] <= then:
            at, cell = heapq.heappop(self._ends)
            claim = self._held.get(cell)
            if claim is None or claim.end != at:
                continue
            del self._held[cell]
            self.busy += (at - claim.begin) * claim.nodes
            self._done.setdefault(cell, []).append(claim.work)
            self._claim(at, cell)
            self._count()
            if not self._held:
                return at
        return then

    def lose(self, now: float, cell: CellId) -> None:
        if cell in self._held:
            self._drop_claim(now, cell)
        self._queue.extend(self._done.pop(cell, ()))
        self._claim_all(now)

    def micro_steps(self, work: float, given: int, least: int) -> int:
        if work <= NOTHING:
            return 0
        return given or max(1, round(work / self._size))

    def _drop_claim(self, now: float, cell: CellId) -> None:
        claim = self._held.pop(cell)
        self.busy += (now - claim.begin) * claim.nodes
        self._queue.append(claim.work)

    def _claim_all(self, now: float) -> None:
        if self._queue:
            for cell in self._nodes:
                if cell not in self._held:
                    self._claim(now, cell)
        self._count()

    def _claim(self, now: float, cell: CellId) -> None:
        if self._queue:
            work = self._queue.popleft()
            fill = self.fill_s if cell not in self._done else 0.0
            nodes = self._nodes[cell]
            end = now + fill + work / nodes
            self._held[cell] = Claim(now, end, work, nodes)
            heapq.heappush(self._ends, (end, cell))

    def _count(self) -> None:
        self.unclaimed, self.open = len(self._queue), len(self._held)
