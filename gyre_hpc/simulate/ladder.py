"""The paper's ablation ladder: from fixed pools to small elastic cells, all at the same mean staleness.

A0 async, A3 async with streaming; C0 colocate, C1 with a standalone pool and extra dispatch, C2 that with streaming;
E0 8 cells of 4 nodes, streaming, bursts of several steps; E1 single-step bursts; E2 4 cells of 8 nodes. Async gets its best
split, every row its best burst length, except where the row's name fixes it. Times are relative to E0, world by world.
"""

from __future__ import annotations

from gyre_hpc.schedule.settings import PolicyName
from gyre_hpc.simulate.choose import choose
from gyre_hpc.simulate.designs import Design
from gyre_hpc.simulate.measure import Measured, Window, measure
from gyre_hpc.simulate.presets import SimulateConfig

BASE = "E0"
PAPER = {
    "A0": 1.556,
    "A3": 1.375,
    "C0": 1.44,
    "C1": 1.40,
    "C2": 1.195,
    "E0": 1.0,
    "E1": 1.109,
    "E2": 1.022,
}
"""Times that Table 1 of the paper implies."""


def rows(nodes: float) -> dict[str, Design]:
    """The designs before their burst length, extra dispatch and split are chosen."""
    gyre, colocate, fixed = PolicyName.GYRE, PolicyName.COLOCATE, PolicyName.ASYNC
    pool = nodes / 8
    return {
        "A0": Design(fixed, streaming=False),
        "A3": Design(fixed),
        "C0": Design(colocate, streaming=False),
        "C1": Design(colocate, pool_nodes=pool, streaming=False),
        "C2": Design(colocate, pool_nodes=pool),
        "E0": Design(gyre, cells=8),
        "E1": Design(gyre, cells=8, steps_per_burst=1),
        "E2": Design(gyre, cells=4),
    }


def ladder(config: SimulateConfig) -> dict[str, Measured]:
    """Every row, measured."""
    window = Window(config.warm_up, config.steps)
    found = {}
    for name, design in rows(config.world.nodes).items():
        chosen = choose(design, config.world, window, config.staleness, bursts=BURSTS.get(name))
        found[name] = measure(chosen, config.world, window, range(config.seeds))
    return found


BURSTS = {"E1": range(1, 2), "E0": range(2, 100), "E2": range(2, 100)}
"""Burst lengths a row may have; any, if it is not named."""


def fixed_pools(config: SimulateConfig) -> dict[str, Measured]:
    """Async and colocate without streaming, and gyre, whose cells are as large as one copy of the trainer may be."""
    window, world = Window(config.warm_up, config.steps), config.world
    designs = {
        "async": Design(PolicyName.ASYNC, streaming=False),
        "colocate": Design(PolicyName.COLOCATE, streaming=False),
        "gyre": Design(PolicyName.GYRE, cells=config.cells),
    }
    found = {}
    for name, design in designs.items():
        chosen = choose(design, world, window, config.staleness, parts=config.cells)
        found[name] = measure(chosen, world, window, range(config.seeds))
    return found
