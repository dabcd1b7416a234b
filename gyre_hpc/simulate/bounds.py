"""Lower bounds on the time of a burst, whatever the schedule, at equal data and staleness.

WC, work conservation: a second of rollout costs 1/C of the machine, a node-second of training 1/nodes of it; no schedule
does either twice as cheaply. BB, burst barrier: with phi = 0 a burst is closed, so its groups are admitted at 0 and group g
cannot be trained before its longest member has ended, r_g. After any instant r the training of all groups with r_g >= r and
the part (x - r)+ of every execution are still to be done, and both share the machine:

    T >= BB = max over r of [ r + sum_{r_g >= r} p_g + sum_i (x_i - r)+ / C ],   BB(r=0) = WC.

Both ignore the size of cells, switches, and that launching everything at once may exceed C. They hold for cells and a pool
with equally many executions per node; where whole slots make these differ, for the machine with its slots spread evenly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from gyre_hpc.simulate.workload import GroupWork
from gyre_hpc.simulate.world import World


def work_conservation_s(groups: Iterable[GroupWork], world: World) -> float:
    """Seconds the whole machine needs for the rollout and the training of these groups."""
    slots = _slots(world)
    return sum(sum(_seconds(group, world)) / slots + _training(group) / world.nodes for group in groups)


def burst_barrier_s(groups: list[GroupWork], world: World) -> float:
    """Seconds a closed burst of these groups needs at least."""
    durations = [_seconds(group, world) for group in groups]
    seconds = np.sort(np.concatenate(durations))
    costs = (_training(group) / world.nodes for group in groups)
    order = sorted(zip(map(max, durations), costs, strict=True))
    releases = np.array([release for release, _ in order])
    later_training = np.cumsum([cost for _, cost in order][::-1])[::-1]
    suffix = np.concatenate([np.cumsum(seconds[::-1])[::-1], [0.0]])
    first = np.searchsorted(seconds, releases, side="right")
    later_rollout = (suffix[first] - (len(seconds) - first) * releases) / _slots(world)
    barrier = float(np.max(releases + later_training + later_rollout))
    return max(barrier, work_conservation_s(groups, world))


def bursts(groups: Iterator[GroupWork], per_burst: int, count: int) -> list[list[GroupWork]]:
    """The groups of `count` closed bursts in dispatch order."""
    return [list(islice(groups, per_burst)) for _ in range(count)]


def _slots(world: World) -> int:
    """C: executions the whole machine serves at once."""
    return world.pool.capacity + sum(world.capacities)


def _seconds(group: GroupWork, world: World) -> list[float]:
    """Durations of the members, cut at the time limit."""
    return [min(seconds, world.limit_s) for seconds in group.seconds]


def _training(group: GroupWork) -> float:
    """Node-seconds that the trainer spends on the group: nothing on invalid members, nor on a group with fewer than 2 valid."""
    kept = [cost for index, cost in enumerate(group.training) if group.is_valid(index)]
    return sum(kept) if len(kept) >= 2 else 0.0
