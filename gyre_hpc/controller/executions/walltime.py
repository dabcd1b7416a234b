"""Whether an execution is launched in the time that is left until the drain of the job (pure).

An execution is expected to need the 90th percentile of what executions of this run took so far (wall seconds), or
`harness.overall_timeout_s` while nothing is known. If that fits, it runs as ever. If not, `cluster.job.walltime_policy` says:
`clip` starts it with its time limit shortened to what is left (it then closes as WALLTIME and is scored), `hold` leaves it to
the next job. With less than a tenth of its need left it is held in any case: its score would be that of a start.
One that fits into no job of this length would be held for ever; it is started in the first half of a job, and clipped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from gyre_hpc.records import SCORED_REASONS, ClosingReason
from gyre_hpc.transport.messages import ExecutionOutcome

REMEMBERED: Final = 256
"""Durations the percentile is taken over: enough for a tail, few enough to follow a policy that learns."""
LEAST_SHARE: Final = 0.1
YOUNG: Final = 0.5
"""Share of a job's whole span that must be left for an execution longer than any job to be started."""


@dataclass(frozen=True)
class Permit:
    """`start` with a time limit of `limit_s` seconds (0.0: none beyond its own), or not in this job."""

    start: bool
    limit_s: float = 0.0


RUN: Final = Permit(start=True)
HOLD: Final = Permit(start=False)


@dataclass
class Durations:
    """Wall seconds of the last executions that ended by themselves or by a limit of the harness."""

    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _p90: float | None = None

    def add(self, seconds: Iterable[float]) -> None:
        """More of them, oldest first."""
        self._seconds.extend(second for second in seconds if second > 0)
        self._p90 = None

    def ended(self, outcome: ExecutionOutcome) -> None:
        """An execution has its outcome. One that was clipped would have taken longer: it does not count."""
        if outcome.reason in SCORED_REASONS and outcome.reason is not ClosingReason.WALLTIME:
            self.add([outcome.wall_s])

    def p90(self) -> float | None:
        """The 90th percentile, None while nothing is known."""
        if self._p90 is None and self._seconds:
            ranked = sorted(self._seconds)
            self._p90 = ranked[min(len(ranked) - 1, math.ceil(0.9 * len(ranked)) - 1)]
        return self._p90


def permit(policy: str, need_s: float, left_s: float, span_s: float) -> Permit:
    """May an execution that needs `need_s` start with `left_s` until the drain of a job that has `span_s` for executions?"""
    if need_s <= left_s:
        return RUN
    longer_than_any_job = need_s > span_s
    if longer_than_any_job:
        return Permit(start=True, limit_s=left_s) if left_s >= YOUNG * span_s > 0 else HOLD
    if policy == "hold" or left_s < LEAST_SHARE * need_s or left_s <= 0:
        return HOLD
    return Permit(start=True, limit_s=left_s)
