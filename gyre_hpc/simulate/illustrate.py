"""Pictures of a study: measured designs of one world, each run once more with its lines recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gyre_hpc.simulate.designs import place
from gyre_hpc.simulate.measure import Measured
from gyre_hpc.simulate.outcome import Outcome
from gyre_hpc.simulate.pictures import draw
from gyre_hpc.simulate.presets import WorldConfig
from gyre_hpc.simulate.scaling import time_against_nodes
from gyre_hpc.simulate.simulator import simulate

STEPS = 12
"""Steps of the recorded runs and of those on other numbers of nodes."""
FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Nodes of the scaling picture over those of the world."""
SCALING_SEEDS = range(3)


def illustrate(
    rows: Mapping[str, Measured],
    base: str,
    world: WorldConfig,
    folder: Path,
    *,
    title: str,
    paper: Mapping[str, float] | None = None,
    scaled: Sequence[str] = (),
) -> list[Path]:
    """Draw the rows into `folder`, times over those of row `base`; the paths, the page last.

    paper: row -> the paper's value. scaled: rows that are also run on fewer and more nodes.
    """
    designs = {name: place(row.design, world, STEPS) for name, row in rows.items()}
    workload = world.workload()
    outcomes: dict[str, list[Outcome]] = {
        name: [simulate(*pair, workload, seed=0, record=True)] for name, pair in designs.items()
    }
    reference = rows[base].seconds
    ladder = {
        name: [mine / its for mine, its in zip(row.seconds, reference, strict=True)]
        for name, row in rows.items()
    }
    sizes = [factor * world.nodes for factor in FACTORS]
    chosen = {name: designs[name] for name in scaled}
    return draw(
        outcomes,
        folder,
        title=title,
        about=in_one_line(world, len(reference)),
        ladder=ladder,
        paper=paper,
        nodes=time_against_nodes(chosen, workload, sizes, SCALING_SEEDS) if chosen else None,
    )


def in_one_line(world: WorldConfig, seeds: int) -> str:
    """What was simulated."""
    return (
        f"{world.nodes:g} nodes with {world.slots:g} slots; {world.batch_groups} groups of"
        f" {world.executions_per_group} executions per step; ratios of {seeds} random worlds;"
        f" timelines, idle time and numbers: the first {STEPS} steps of one"
    )
