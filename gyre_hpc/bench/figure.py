"""One figure of a benchmark: a number, how to read it, and what it was held against."""

from __future__ import annotations

import msgspec


class Figure(msgspec.Struct, frozen=True):
    """`better` is "higher" or "lower". `aim` and `bound` (the best any code could do) are in `unit`; None = none stated.

    `against` names the baseline measured in the same run.
    """

    value: float
    unit: str
    better: str
    aim: float | None = None
    bound: float | None = None
    against: str = ""
