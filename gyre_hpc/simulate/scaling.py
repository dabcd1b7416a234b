"""The same designs on more or fewer nodes: cells of the same count, each with nodes and slots in proportion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gyre_hpc.schedule.settings import Settings
from gyre_hpc.simulate.simulator import simulate
from gyre_hpc.simulate.workload import Workload
from gyre_hpc.simulate.world import Place, World


def at_nodes(settings: Settings, world: World, nodes: float) -> tuple[Settings, World]:
    """A world of `nodes` nodes in all and the settings that fit it; the data of a step stay the same."""
    factor = nodes / world.nodes
    cells = tuple(_scaled(place, factor) for place in world.cells)
    pool = Place(world.pool.nodes * factor, round(world.pool.capacity * factor))
    world = msgspec.structs.replace(world, cells=cells, pool=pool)
    settings = msgspec.structs.replace(settings, capacities=world.capacities, pool=pool.capacity)
    return settings, world


def _scaled(place: Place, factor: float) -> Place:
    return Place(place.nodes * factor, max(1, round(place.capacity * factor)))


def time_against_nodes(
    designs: Mapping[str, tuple[Settings, World]],
    workload: Workload,
    nodes: Iterable[float],
    seeds: Sequence[int],
    warm_up: int = 0,
) -> dict[str, dict[float, list[float]]]:
    """Design -> nodes -> seconds per step by seed."""
    sizes = tuple(nodes)
    return {
        name: {
            size: [
                simulate(*at_nodes(settings, world, size), workload, seed).seconds_per_step(warm_up)
                for seed in seeds
            ]
            for size in sizes
        }
        for name, (settings, world) in designs.items()
    }
