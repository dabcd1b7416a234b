"""Held-out evaluation points: which executions belong to which, and their scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gyre_hpc.records import Assessment, ExecutionId, Version


@dataclass
class EvaluationPoint:
    """One evaluation of one version. `scores` holds valid scores only; `invalid` counts the rest."""

    version: Version
    size: int
    members: list[ExecutionId] = field(default_factory=list)
    scores: dict[ExecutionId, float] = field(default_factory=dict)
    invalid: int = 0

    @property
    def complete(self) -> bool:
        return len(self.scores) + self.invalid >= self.size

    @property
    def mean(self) -> float | None:
        return sum(self.scores.values()) / len(self.scores) if self.scores else None

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean over executions; None below 2 scores."""
        count = len(self.scores)
        if count < 2 or self.mean is None:
            return None
        variance = sum((score - self.mean) ** 2 for score in self.scores.values()) / (count - 1)
        return math.sqrt(variance / count)


@dataclass
class Evaluations:
    """The points of a run that are not complete, in order."""

    points: list[EvaluationPoint] = field(default_factory=list)
    _of: dict[ExecutionId, EvaluationPoint] = field(default_factory=dict)

    @classmethod
    def restored(cls, points: list[EvaluationPoint]) -> Evaluations:
        return cls(points, {id: point for point in points for id in point.members})

    def due(self, version: Version, size: int) -> EvaluationPoint:
        point = EvaluationPoint(version, size)
        self.points.append(point)
        return point

    def launched(self, id: ExecutionId, version: Version) -> int:
        """Bind an execution to the open point of `version`; returns its position there."""
        point = next(
            item for item in self.points if item.version == version and len(item.members) < item.size
        )
        point.members.append(id)
        self._of[id] = point
        return len(point.members) - 1

    def of(self, id: ExecutionId) -> EvaluationPoint:
        """The point of a launched execution without an outcome."""
        return self._of[id]

    def position(self, id: ExecutionId) -> int:
        """Position of a launched execution in its point."""
        return self._of[id].members.index(id)

    def outcome(self, id: ExecutionId, assessment: Assessment | None) -> EvaluationPoint:
        """Record an outcome; returns the point it belongs to, which is forgotten when it is complete."""
        point = self._of[id]
        if assessment is not None and assessment.score is not None:
            point.scores.setdefault(id, assessment.score)
        else:
            point.invalid += 1
        if point.complete:
            self.points.remove(point)
            for member in point.members:
                del self._of[member]
        return point
