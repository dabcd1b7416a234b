"""Chooses the burst length, the extra dispatch and the split of a design: the fastest at a given mean staleness."""

from __future__ import annotations

import statistics
from itertools import islice

from gyre_hpc.errors import ConfigError
from gyre_hpc.schedule.settings import PolicyName
from gyre_hpc.simulate.designs import Design, place, points, splits
from gyre_hpc.simulate.measure import STALENESS_TOLERANCE, STEADY, Run, Window
from gyre_hpc.simulate.presets import WorldConfig
from gyre_hpc.simulate.workload import GroupWork, Workload

SEEDS = (1000, 1001)
"""Random worlds that a design is chosen in; never those it is measured in."""
SAMPLE_STEPS = 12
SHORTER = 0.9
"""Executions trained in a window may be this much shorter than the mean: the short ones end first."""


def choose(
    design: Design,
    config: WorldConfig,
    window: Window,
    staleness: float,
    *,
    bursts: range | None = None,
    parts: int = 8,
) -> Design:
    """The fastest point of equal staleness, and for async without a split the fastest of `parts` equal parts.

    A point whose measured staleness is not the target does not count. Raises ConfigError if none is left.
    """
    found = [
        point
        for point in points(design, staleness, config.batch_groups)
        if bursts is None or point.steps_per_burst in bursts
    ]
    if design.policy is PolicyName.ASYNC and not design.training_nodes:
        found = [split for point in found for split in splits(point, config.nodes, parts)]
    workload = config.workload()
    for candidate in _fastest_first(found, config, workload, window):
        steady = Run(candidate, config, workload, STEADY, SEEDS[0])
        if abs(steady.outcome.staleness_after(STEADY.warm_up) - staleness) <= STALENESS_TOLERANCE:
            return candidate
    raise ConfigError(
        f"staleness={staleness:g}: no burst length and extra dispatch reach it with B={config.batch_groups}",
        fix="use a multiple of 0.5",
    )


def _fastest_first(
    designs: list[Design], config: WorldConfig, workload: Workload, window: Window
) -> list[Design]:
    """By time per step. A design that cannot beat one already timed, whatever its schedule, is not run."""
    source = workload.groups(SEEDS[0], config.executions_per_group)
    sample = list(islice(source, SAMPLE_STEPS * config.batch_groups))
    least = {design: _least_s(design, config, sample) for design in designs}
    seconds: dict[Design, float] = {}
    for design in sorted(designs, key=lambda design: least[design]):
        if not seconds or least[design] < min(seconds.values()):
            runs = [Run(design, config, workload, window, seed).seconds for seed in SEEDS]
            seconds[design] = statistics.fmean(runs)
    return sorted(seconds, key=lambda design: seconds[design])


def _least_s(design: Design, config: WorldConfig, sample: list[GroupWork]) -> float:
    """Seconds per step that the busier of async's fixed pools needs at least; 0 for the other policies."""
    if design.policy is not PolicyName.ASYNC:
        return 0.0
    _, world = place(design, config, SAMPLE_STEPS)
    training = sum(sum(group.training) for group in sample) / world.cells[0].nodes
    rollout = sum(sum(group.seconds) for group in sample) / world.cells[1].capacity
    return SHORTER * max(training, rollout) / SAMPLE_STEPS
