"""Measures designs in a world: seconds per step of several random worlds, staleness, idle shares, lower bounds.

Every design meets the same groups in the same order under the same seed, so ratios are paired. A window of steps is
measured from a publication to a publication: bursts are never cut.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil

from gyre_hpc.errors import ConfigError
from gyre_hpc.report.intervals import Interval
from gyre_hpc.simulate.bounds import burst_barrier_s, work_conservation_s
from gyre_hpc.simulate.designs import Design, place
from gyre_hpc.simulate.outcome import Outcome
from gyre_hpc.simulate.presets import WorldConfig
from gyre_hpc.simulate.simulator import simulate
from gyre_hpc.simulate.workload import GroupWork, Workload

STALENESS_TOLERANCE = 0.05
"""How far measured staleness may be from the target before two designs do not count as equally stale."""


@dataclass(frozen=True)
class Window:
    """`steps` steps after `warm_up` steps."""

    warm_up: int
    steps: int


STEADY = Window(12, 24)
"""Where staleness is measured if the window itself begins at the start."""


@dataclass(frozen=True)
class Measured:
    """One design in one world. Per-seed values are in the order of the seeds."""

    design: Design
    seconds: tuple[float, ...]
    """Seconds per step."""
    staleness: float
    """Measured mean in steady state."""
    work_conservation: tuple[float, ...]
    """WC, seconds per step, of the same groups."""
    burst_barrier: tuple[float, ...] | None
    """BB, seconds per step; None with extra dispatch, for which it does not hold."""
    idle: dict[str, float]
    """"role cause" -> share of all device time."""

    @property
    def hours(self) -> Interval:
        """Hours per step."""
        return Interval.of([seconds / 3600 for seconds in self.seconds])

    @property
    def equally_stale(self) -> bool:
        """Whether measured staleness is what the design was chosen for."""
        return abs(self.staleness - self.design.staleness) <= STALENESS_TOLERANCE

    @property
    def gap_wc(self) -> float:
        """Time over work conservation - 1."""
        return _excess(self.seconds, self.work_conservation)

    @property
    def gap_bb(self) -> float | None:
        """Time over the burst barrier - 1."""
        return None if self.burst_barrier is None else _excess(self.seconds, self.burst_barrier)

    def ratio_to(self, other: Measured) -> Interval:
        """Time over the other's, world by world."""
        return Interval.of([mine / its for mine, its in zip(self.seconds, other.seconds, strict=True)])


def _excess(seconds: Sequence[float], bound: Sequence[float]) -> float:
    return statistics.fmean(mine / least for mine, least in zip(seconds, bound, strict=True)) - 1


def measure(design: Design, config: WorldConfig, window: Window, seeds: Iterable[int]) -> Measured:
    """Run the design once per seed."""
    workload = config.workload()
    runs = [Run(design, config, workload, window, seed) for seed in seeds]
    idle = Counter[str]()
    for run in runs:
        idle.update(run.outcome.idle_shares())
    barriers = [run.burst_barrier for run in runs]
    return Measured(
        design=design,
        seconds=tuple(run.seconds for run in runs),
        staleness=_steady_staleness(design, config, workload, window, runs),
        work_conservation=tuple(run.work_conservation for run in runs),
        burst_barrier=tuple(value for value in barriers if value is not None) or None,
        idle={cause: share / len(runs) for cause, share in idle.items()},
    )


def seconds_per_step(design: Design, config: WorldConfig, window: Window, seed: int) -> float:
    """Of one run."""
    return Run(design, config, config.workload(), window, seed).seconds


def _steady_staleness(
    design: Design, config: WorldConfig, workload: Workload, window: Window, runs: list[Run]
) -> float:
    """Of the measured runs if they had a warm-up, else of one longer run."""
    if window.warm_up:
        return statistics.fmean(run.outcome.staleness_after(window.warm_up) for run in runs)
    longer = Run(design, config, workload, STEADY, seed=0)
    return longer.outcome.staleness_after(STEADY.warm_up)


class Run:
    """One simulated run up to the end of the window, which begins and ends with a publication."""

    def __init__(
        self, design: Design, config: WorldConfig, workload: Workload, window: Window, seed: int
    ) -> None:
        last = window.warm_up + window.steps
        margin = 2 * ceil(design.extra_dispatch + design.steps_per_burst)
        settings, self._world = place(design, config, last + margin)
        self.outcome: Outcome = simulate(settings, self._world, workload, seed, until=last)
        self._begin, begin_s = _served(self.outcome, window.warm_up)
        self._end, end_s = _served(self.outcome, last)
        self._design, self._size = design, config.batch_groups
        self.seconds = (end_s - begin_s) / (self._end - self._begin)
        source = workload.groups(seed, config.executions_per_group)
        self._groups = list(islice(source, self._begin * self._size, self._end * self._size))

    @property
    def work_conservation(self) -> float:
        """WC in seconds per step."""
        return work_conservation_s(self._groups, self._world) / (self._end - self._begin)

    @property
    def burst_barrier(self) -> float | None:
        """BB in seconds per step."""
        if self._design.extra_dispatch:
            return None
        bursts = _cut(self._groups, self._design.steps_per_burst * self._size)
        return sum(burst_barrier_s(burst, self._world) for burst in bursts) / (self._end - self._begin)


def _cut(groups: list[GroupWork], size: int) -> Iterator[list[GroupWork]]:
    for begin in range(0, len(groups), size):
        yield groups[begin : begin + size]


def _served(outcome: Outcome, version: int) -> tuple[int, float]:
    """(version, when) of the first publication of at least this version; (0, 0) is the start."""
    if version == 0:
        return 0, 0.0
    if not outcome.published or max(outcome.published) < version:
        raise ConfigError(
            f"the run ended before version {version}: {outcome.reason}", fix="look at its faults"
        )
    return min((served, at) for served, at in outcome.published.items() if served >= version)
