"""`gyre bench simulate`: the designs of the paper's ladder on 192 nodes, 48 steps, 8 random worlds each.

The machine is world L (192 nodes, durations piled at the time limit): 4 cells of 48 nodes in E2, 8 of 24 in E0 and E1,
fixed halves for async, a pool of 24 nodes beside C1 and C2; all at mean staleness 1.5. Time is CPU seconds of this one
process. A discrete-event simulator cannot be faster than its heap: the yardstick pops and pushes one entry per event told
to the schedule, on a heap as large as the executions under way.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from gyre_hpc.bench.figure import Figure
from gyre_hpc.schedule.settings import PolicyName, Settings
from gyre_hpc.simulate.designs import Design, place
from gyre_hpc.simulate.ladder import rows
from gyre_hpc.simulate.presets import WorldConfig, compose
from gyre_hpc.simulate.simulator import simulate
from gyre_hpc.simulate.world import World

STEPS = 48
SEEDS = 8
AIM_S = 20.0
WORLD = "L"
MEAN_STALENESS = 1.5
BURST_STEPS = {"A0": 1, "A3": 1, "C0": 4, "C1": 2, "C2": 2, "E0": 4, "E1": 1, "E2": 4}
"""mu of each row; extra dispatch makes up the rest of the staleness."""


class Point(NamedTuple):
    """A design in its world."""

    settings: Settings
    world: World


class Cost(NamedTuple):
    """What some runs took: CPU seconds, events told to the schedule, and the heap's CPU seconds for as many entries."""

    seconds: float
    events: int
    heap_s: float


def config() -> WorldConfig:
    """The world at paper scale."""
    return compose([f"world={WORLD}"]).world


def points(world: WorldConfig, steps: int) -> dict[str, Point]:
    """Every row of the ladder at its burst length."""
    found = {}
    for name, design in rows(world.nodes).items():
        found[name] = Point(*place(_at_burst(design, BURST_STEPS[name], world.nodes), world, steps))
    return found


def _at_burst(design: Design, steps: int, nodes: float) -> Design:
    ahead = MEAN_STALENESS - (steps - 1) / 2
    design = replace(design, steps_per_burst=steps, extra_dispatch=ahead)
    return replace(design, training_nodes=nodes / 2) if design.policy is PolicyName.ASYNC else design


def measure(world: WorldConfig, designs: Mapping[str, Point], seeds: Iterable[int]) -> dict[str, Cost]:
    """Design -> cost of its runs with these seeds."""
    workload, seeds = world.workload(), tuple(seeds)
    found = {}
    for name, point in designs.items():
        before = time.process_time()
        events = sum(simulate(*point, workload, seed).events for seed in seeds)
        seconds = time.process_time() - before
        found[name] = Cost(seconds, events, heap_seconds(events, int(world.slots)))
    return found


def heap_seconds(events: int, size: int) -> float:
    """CPU seconds to pop and push that many (time, id) entries on a heap of `size`."""
    draws = random.Random(0)
    heap = [(draws.random(), entry) for entry in range(size)]
    delays = [draws.random() for _ in range(events)]
    heapq.heapify(heap)
    pop, push = heapq.heappop, heapq.heappush
    before = time.process_time()
    for delay in delays:
        now, entry = pop(heap)
        push(heap, (now + delay, entry))
    return time.process_time() - before


def figures(costs: Mapping[str, Cost]) -> dict[str, Figure]:
    """Figures of all designs together."""
    seconds = sum(cost.seconds for cost in costs.values())
    events = sum(cost.events for cost in costs.values())
    heap_s = sum(cost.heap_s for cost in costs.values())
    against = "a bare loop of heappop and heappush with as many entries"
    return {
        "paper_scale_s": Figure(seconds, "CPU s", "lower", aim=AIM_S, bound=heap_s, against=against),
        "heap_loop_share": Figure(heap_s / seconds, "ratio", "higher", bound=1.0, against=against),
        "events_per_s": Figure(events / seconds, "1/CPU s", "higher", bound=events / heap_s, against=against),
    }


def run() -> dict[str, Figure]:
    """Figures at paper scale, after one run that warms up."""
    world = config()
    measure(world, {"warm-up": points(world, 1)["E0"]}, [0])
    return figures(measure(world, points(world, STEPS), range(SEEDS)))
