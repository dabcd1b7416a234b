"""The open batch as a fluid: work flows in with groups and out at the rate of the cells that train."""

from __future__ import annotations

from dataclasses import dataclass

from gyre_hpc.records import GroupId


@dataclass
class OpenBatch:
    """Node-seconds left of the open batch. `rate`: nodes of the cells whose join is committed."""

    index: int = -1
    groups: int = 0
    """How many of its groups have been added."""
    left: float = 0.0
    rate: float = 0.0
    epoch: int = 0
    """Rises when work is added: an end computed before is void."""

    def begin(self, index: int) -> None:
        """Another batch is open; work of the one before is void."""
        self.index, self.groups, self.left = index, 0, 0.0
        self.epoch += 1

    def add(self, groups: tuple[GroupId, ...], work: dict[GroupId, float]) -> None:
        """Groups that the batch has taken since."""
        self.left += sum(work[group] for group in groups[self.groups :])
        self.groups = len(groups)
        self.epoch += 1

    def advance(self, seconds: float) -> None:
        """Train for that long."""
        if self.left:
            left = self.left - seconds * self.rate
            self.left = left if left > 1e-6 * self.rate else 0.0

    @property
    def seconds_left(self) -> float:
        """Until the fluid ends at this rate."""
        return self.left / self.rate if self.left and self.rate else float("inf")
