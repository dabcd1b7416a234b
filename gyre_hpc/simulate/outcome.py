"""What a simulated run shows: steps with their staleness, device time by role and cause, roles over time.

`lines` are the same typed metrics that a live run writes, so the same report draws both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre_hpc.records import Version
from gyre_hpc.report import metrics as m

DeviceTime = dict[tuple[str, str], float]
"""(role, cause of idleness or "" when busy) -> node-seconds."""


@dataclass(frozen=True)
class StepTaken:
    """One optimizer step: when it was committed, and the staleness of each of its groups."""

    at_s: float
    version: Version
    staleness: tuple[int, ...]


@dataclass
class Outcome:
    """Filled by the simulator. `seconds` is when the run stopped, `published` when each version was served."""

    nodes: float
    seconds: float = 0.0
    reason: str = ""
    """Why the schedule stopped; empty when all steps were taken."""
    events: int = 0
    """Events told to the schedule."""
    steps: list[StepTaken] = field(default_factory=list)
    published: dict[Version, float] = field(default_factory=dict)
    switches: int = 0
    written_off: int = 0
    device_time: DeviceTime = field(default_factory=dict)
    lines: list[m.AnyMetric] = field(default_factory=list)
    """Only if asked for."""

    @property
    def staleness(self) -> float:
        """Mean over all groups trained."""
        values = [value for step in self.steps for value in step.staleness]
        return sum(values) / len(values) if values else 0.0

    def staleness_after(self, warm_up: int) -> float:
        """Mean over the groups of the steps after the first `warm_up`."""
        values = [value for step in self.steps[warm_up:] for value in step.staleness]
        return sum(values) / len(values) if values else 0.0

    def seconds_per_step(self, warm_up: int = 0) -> float:
        """Steady state: from the commit of step `warm_up` (0: the start) to the last publication."""
        begin = self.steps[warm_up - 1].at_s if warm_up else 0.0
        return (self.seconds - begin) / (len(self.steps) - warm_up)

    def idle_shares(self) -> dict[str, float]:
        """ "role cause" -> share of all device time, idle time only."""
        total = sum(self.device_time.values())
        return {
            f"{role} {cause}": seconds / total
            for (role, cause), seconds in sorted(self.device_time.items())
            if cause
        }
