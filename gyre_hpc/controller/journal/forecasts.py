"""How long an execution of a query is expected to take: the history behind `schedule.launch_order=longest_first`.

The history of the journal adds every outcome as it is journaled and, on resume, those of the journal in the same order, so a
resumed run expects what the interrupted one did. Only executions of training groups whose harness ran to an end of its own count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gyre_hpc.records import SCORED_REASONS, GroupId
from gyre_hpc.schedule.protocol import Forecast
from gyre_hpc.transport.messages import ExecutionOutcome

REMEMBERED = 4
"""Executions of a query that its forecast is the mean of: enough to average, few enough to follow a policy that learns."""


@dataclass
class Forecasts:
    """Wall seconds of the last finished executions of each query."""

    _seconds: dict[str, deque[float]] = field(default_factory=dict)

    @classmethod
    def restored(cls, durations: dict[str, list[float]]) -> Forecasts:
        """From what `durations` gave."""
        return cls({query: deque(past, maxlen=REMEMBERED) for query, past in durations.items()})

    def durations(self) -> dict[str, list[float]]:
        """Seconds of each query's last executions, oldest first."""
        return {query: list(past) for query, past in self._seconds.items()}

    def ended(self, outcome: ExecutionOutcome) -> None:
        """An execution has its final outcome; call it once for each."""
        if outcome.group is not None and outcome.reason in SCORED_REASONS and outcome.wall_s > 0:
            past = self._seconds.setdefault(outcome.query, deque(maxlen=REMEMBERED))
            past.append(outcome.wall_s)

    def of(self, query: str) -> float:
        """Seconds: the mean of the query's last executions, else over all queries, else 0."""
        past = self._seconds.get(query)
        if past is not None:
            return _mean(past)
        return _mean([_mean(seconds) for seconds in self._seconds.values()])

    def event(self, groups: Iterable[GroupId], query: Callable[[GroupId], str]) -> Forecast:
        """What the schedule is told of these groups."""
        return Forecast(tuple((group, self.of(query(group))) for group in groups))


def _mean(seconds: Iterable[float]) -> float:
    values = list(seconds)
    return sum(values) / len(values) if values else 0.0
