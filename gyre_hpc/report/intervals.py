"""The mean of a few repeated measurements and its 95 % interval (Student's t, two-sided)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""0.975 quantiles of Student's t for 1 to 30 degrees of freedom."""


class Interval(NamedTuple):
    """A mean with the ends of its interval; of a single value both ends are that value."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """The interval of the mean of independent values."""
        mean, count = fmean(values), len(values)
        if count < 2:
            return cls(mean, mean, mean)
        quantile = T_975[count - 2] if count - 2 < len(T_975) else 1.96
        half = quantile * stdev(values) / math.sqrt(count)
        return cls(mean, mean - half, mean + half)

    @property
    def known(self) -> bool:
        """Whether the values differed, so that there is something to draw."""
        return self.high > self.low
