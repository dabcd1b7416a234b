"""Lower bounds on the time of a burst, whatever the schedule, at equal data and staleness.

WC, work conservation: a second of rollout costs 1/C of the machine, a node-second of training 1/nodes of it; no schedule
does either twice as cheaply. BB, burst barrier: with phi = 0 a burst is closed, so its groups are admitted at 0 and group g
cannot be trained before its longest member has ended, r_g. After any instant r the training of all groups with r_g >= r and
the part (x - r)+ of every execution are still to be done, and both share the machine:

    T >= BB = max over r of [ r + sum_{r_g >= r} p_g + sum_i (x_i - r)+ / C ],   BB(r=0) = WC.

Both ignore the size of cells, switches, and that launching everything at once may exceed C.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from gyre_hpc.simulate.workload import GroupWork
from gyre_hpc.simulate.world import World


def work_conservation_s(groups: Iterable[GroupWork], world: World) -> float:
    """Seconds the whole machine needs for the rollout and the training of these groups."""
    rollout = sum(sum(group.seconds) for group in groups) / _slots(world)
    return rollout + sum(sum(group.training) for group in groups) / world.nodes


def burst_barrier_s(groups: list[GroupWork], world: World) -> float:
    """Seconds a closed burst of these groups needs at least."""
    seconds = np.sort(np.concatenate([group.seconds for group in groups]))
    order = sorted((max(group.seconds), sum(group.training) / world.nodes) for group in groups)
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
