"""What pictures and tables show of outcomes: the metrics lines of a live run, idle shares by cause, words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gyre_hpc.report import metrics as m
from gyre_hpc.report.figures import time_unit
from gyre_hpc.report.summary import idle_shares
from gyre_hpc.simulate.outcome import Outcome

Designs = Mapping[str, Sequence[Outcome]]
"""Design -> its outcomes, one per seed, in the order the designs are to stand in."""


def busy_lines(outcome: Outcome) -> list[m.Busy]:
    """The device time of the whole run, as the lines of one cell."""
    return [
        m.Busy(outcome.seconds, 0, role, seconds, 0.0 if cause else seconds, cause)
        for (role, cause), seconds in sorted(outcome.device_time.items())
    ]


def metric_lines(outcome: Outcome) -> list[m.AnyMetric]:
    """All lines of a recorded outcome, in order of time; the last one is as late as the run's end."""
    return sorted([*outcome.lines, *step_lines(outcome), *busy_lines(outcome)], key=lambda line: line.t)


def step_lines(outcome: Outcome) -> list[m.Step]:
    """One line per optimizer step; what a simulation does not know (scores, tokens) is absent."""
    lines, began = [], 0.0
    for step in outcome.steps:
        size = len(step.staleness)
        lines.append(
            m.Step(step.at_s, step.version, None, size, 0, 0, 0, step.staleness, {}, step.at_s - began)
        )
        began = step.at_s
    return lines


def recorded(designs: Designs) -> dict[str, Outcome]:
    """The first outcome of each design that has lines."""
    firsts = (
        (name, next((one for one in outcomes if one.lines), None)) for name, outcomes in designs.items()
    )
    return {name: first for name, first in firsts if first is not None}


def idle_by_cause(designs: Designs) -> dict[str, dict[str, float]]:
    """Design -> cause of idleness -> share of all device time, over all seeds."""
    shares = {}
    for name, outcomes in designs.items():
        lines = [line for outcome in outcomes for line in busy_lines(outcome)]
        if lines:
            causes = idle_shares(lines)["all"]
            shares[name] = {cause: share for cause, share in causes.items() if cause != "total"}
    return shares


def duration(seconds: float, of: float | None = None) -> str:
    """Seconds in the unit that reads best, for it alone or for a longer whole that it is part of."""
    unit, word = time_unit(seconds if of is None else of)
    return f"{seconds / unit:.3g} {word}"


def in_words(outcome: Outcome) -> str:
    """A run in half a line."""
    if not outcome.published:
        return outcome.reason or "nothing was published"
    time = duration(outcome.seconds_per_step(), outcome.seconds)
    idle = sum(outcome.idle_shares().values())
    return f"{time} per step, mean staleness {outcome.staleness:.2f}, {idle:.0%} of device time idle"
