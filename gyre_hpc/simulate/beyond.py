"""Beyond the paper: bundle A against E0, the paper's best design, in several worlds at equal staleness and data.

Bundle A: twice as many cells of half the nodes, executions launched longest first by their query's history, and joins that
overlap; nothing of it changes which executions are trained or how stale they are. `less_training` is bundle A with three
quarters of the training work (shared prefixes computed once), against E0 with all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gyre_hpc.schedule.settings import LaunchOrder, PolicyName
from gyre_hpc.simulate.designs import Design
from gyre_hpc.simulate.measure import Measured, Window, measure
from gyre_hpc.simulate.presets import SimulateConfig, WorldConfig, compose_world

LESS_TRAINING = 0.75
E0 = Design(PolicyName.GYRE, cells=8)
BUNDLE_A = Design(PolicyName.GYRE, cells=16, launch_order=LaunchOrder.LONGEST_FIRST, overlap_joins=True)


@dataclass(frozen=True)
class Comparison:
    """One world."""

    world: str
    base: Measured
    bundle: Measured
    less_training: Measured


def at_staleness(design: Design, staleness: float) -> Design:
    """One burst as long as this mean staleness allows, without extra dispatch beyond the rest."""
    steps = int(2 * staleness) + 1
    return replace(design, steps_per_burst=steps, extra_dispatch=staleness - (steps - 1) / 2)


def compare(name: str, world: WorldConfig, config: SimulateConfig) -> Comparison:
    """E0, bundle A, and bundle A with less training work."""
    window, seeds = Window(config.warm_up, config.steps), range(config.seeds)
    base, bundle = (at_staleness(design, config.staleness) for design in (E0, BUNDLE_A))
    less = replace(world, training_work=world.training_work * LESS_TRAINING)
    return Comparison(
        world=name,
        base=measure(base, world, window, seeds),
        bundle=measure(bundle, world, window, seeds),
        less_training=measure(bundle, less, window, seeds),
    )


def beyond(config: SimulateConfig, overrides: Sequence[str]) -> Iterator[Comparison]:
    """Every world of the study, with the call's overrides."""
    for name in config.worlds:
        yield compare(name, compose_world(list(overrides), name), config)
