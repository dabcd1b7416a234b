"""Gyre against every baseline on the same equal cells, each at its best design point of the same mean staleness.

The rows are those of `gyre bench schedule`: colocate and async as the paper's headline has them (`async_whole` trains when the
whole batch is ready), and the stronger forms that it has in its ablation: streaming, and a standalone pool of one cell. Async
is split in whole cells, because a trainer takes one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gyre_hpc.schedule.settings import PolicyName
from gyre_hpc.simulate.choose import choose
from gyre_hpc.simulate.designs import Design
from gyre_hpc.simulate.measure import Measured, Window, measure
from gyre_hpc.simulate.presets import SimulateConfig, WorldConfig, compose_world

OURS = "gyre"


def rows(nodes: float, cells: int) -> dict[str, Design]:
    """The designs before their burst length, extra dispatch and split are chosen."""
    colocate, fixed, pool = PolicyName.COLOCATE, PolicyName.ASYNC, nodes / cells
    return {
        OURS: Design(PolicyName.GYRE, cells=cells, overlap_joins=True),
        "colocate": Design(colocate),
        "colocate_pool": Design(colocate, pool_nodes=pool),
        "colocate_pool_whole": Design(colocate, pool_nodes=pool, streaming=False),
        "async": Design(fixed),
        "async_whole": Design(fixed, streaming=False),
    }


def against_baselines(config: SimulateConfig, world: WorldConfig) -> dict[str, Measured]:
    """Every row, measured in this world."""
    window, seeds = Window(config.warm_up, config.steps), range(config.seeds)
    found = {}
    for name, design in rows(world.nodes, config.cells).items():
        chosen = choose(design, world, window, config.staleness, parts=config.cells)
        found[name] = measure(chosen, world, window, seeds)
    return found


def baselines(config: SimulateConfig, overrides: Sequence[str]) -> Iterator[tuple[str, dict[str, Measured]]]:
    """(world, rows) of every world of the study, with the call's overrides."""
    for name in config.worlds:
        yield name, against_baselines(config, compose_world(list(overrides), name))
