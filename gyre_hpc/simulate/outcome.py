"""What a simulated run shows: steps with their staleness, device time by role and cause, roles over time.

`lines` are the same typed metrics that a live run writes, so the same report draws both. Roles and causes of idleness are
those of a live run too; all of them add up to nodes x seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gyre_hpc.records import CellId, Version
from gyre_hpc.report import metrics as m
from gyre_hpc.schedule.state import Cell, CellRole, serves

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
    """Those that count: steps undone by a restored core are not here."""
    published: dict[Version, float] = field(default_factory=dict)
    switches: int = 0
    written_off: int = 0
    device_time: DeviceTime = field(default_factory=dict)
    lines: list[m.AnyMetric] = field(default_factory=list)
    """Only if asked for."""

    @property
    def staleness(self) -> float:
        """Mean over all groups trained."""
        return self.staleness_after(0)

    def staleness_after(self, warm_up: int) -> float:
        """Mean over the groups of the steps after the first `warm_up`."""
        values = [value for step in self.steps[warm_up:] for value in step.staleness]
        return sum(values) / len(values) if values else 0.0

    def seconds_per_step(self, warm_up: int = 0) -> float:
        """Steady state: from the publication (else the commit) of step `warm_up` (0: the start) to the last publication.

        Raises ValueError when no step came after the warm-up.
        """
        if len(self.steps) <= warm_up or not self.published:
            raise ValueError(f"{len(self.steps)} steps, none after a warm-up of {warm_up}: {self.reason}")
        begin = 0.0
        if warm_up:
            last = self.steps[warm_up - 1]
            begin = self.published.get(last.version, last.at_s)
        return (max(self.published.values()) - begin) / (len(self.steps) - warm_up)

    def idle_shares(self) -> dict[str, float]:
        """ "role cause" -> share of all device time, idle time only."""
        total = sum(self.device_time.values())
        return {
            f"{role} {cause}": seconds / total
            for (role, cause), seconds in sorted(self.device_time.items())
            if cause
        }


class DeviceClock:
    """Adds up device time between changes of roles. `nodes` of each cell; the pool's serve all the time."""

    def __init__(self, nodes: Mapping[CellId, float], pool: float, tool_share: float) -> None:
        self._nodes, self._pool, self._tools = nodes, pool, tool_share
        self._all = pool + sum(nodes.values())
        self._serving = self._training = self._switching = 0.0
        self._used = self._free = 0.0
        self._trained = self._switched = self._down = 0.0
        self._elapsed = 0.0
        """Seconds in the present roles that only `used` and `free` have so far."""
        self.roles((), serving=True)

    def roles(self, cells: Iterable[Cell], *, serving: bool) -> None:
        """The live cells: some have changed roles. `serving`: whether the pool serves."""
        self._flush()
        self._serving, self._training, self._switching = self._pool if serving else 0.0, 0.0, 0.0
        for cell in cells:
            nodes = self._nodes[cell.id]
            if cell.role is CellRole.TRAINING:
                self._training += nodes
            elif serves(cell):
                self._serving += nodes
            elif cell.role not in (CellRole.ROLLOUT, CellRole.STARTING):
                self._switching += nodes

    def advance(self, seconds: float, running: int, capacity: int) -> None:
        """Let time pass with `running` executions on rollout cells of this capacity."""
        share = min(1.0, running / capacity) if capacity else 0.0
        self._used += seconds * self._serving * share
        self._free += seconds * self._serving * (1.0 - share)
        self._elapsed += seconds

    def _flush(self) -> None:
        seconds, self._elapsed = self._elapsed, 0.0
        self._trained += seconds * self._training
        self._switched += seconds * self._switching
        self._down += seconds * (self._all - self._serving - self._training - self._switching)

    def total(self, busy: float) -> DeviceTime:
        """All device time so far. `busy`: node-seconds in which training cells had something to do."""
        self._flush()
        shares = {
            ("rollout", ""): self._used * (1.0 - self._tools),
            ("rollout", "tools"): self._used * self._tools,
            ("rollout", "no_work"): self._free,
            ("training", ""): busy,
            ("training", "no_micro_steps"): max(0.0, self._trained - busy),
            ("switching", "switching"): self._switched,
            ("down", "down"): self._down,
        }
        return {key: seconds for key, seconds in shares.items() if seconds > 1e-9 * self._all}
