"""The least that the steps of a recorded run could have taken, whatever the schedule, on the run's own durations and costs.

With phi = 0 the burst barrier: a burst's groups start together, and none is trained before its longest execution has ended.
With extra dispatch that does not hold, and work conservation is left: the machine is never idle (simulate/bounds.py). Starts
of harnesses are part of the durations; role switches, steps and publications are not, nor is the size of cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gyre_hpc.simulate.bounds import burst_barrier_s, work_conservation_s
from gyre_hpc.simulate.recorded import read_recording
from gyre_hpc.simulate.workload import GroupWork
from gyre_hpc.simulate.world import World


def least_seconds_per_step(run: Path, first: int, last: int) -> float:
    """Of the steps after `first` up to `last`, both published. Raises MissingInput naming what the run folder lacks."""
    recording = read_recording(run)
    schedule, recorded = recording.config.schedule, recording.workload.recorded
    size = schedule.batch_groups
    groups = recorded[first * size : last * size]
    burst = 0 if schedule.extra_dispatch else schedule.steps_per_burst * size
    return least_seconds(groups, recording.world, burst) / (last - first)


def least_seconds(groups: Sequence[GroupWork], world: World, burst: int) -> float:
    """Of these groups in closed bursts of `burst` groups; 0: whatever the bursts."""
    if not burst:
        return work_conservation_s(groups, world)
    bursts = (list(groups[at : at + burst]) for at in range(0, len(groups), burst))
    return sum(burst_barrier_s(each, world) for each in bursts)
