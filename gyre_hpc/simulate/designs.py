"""Designs: how a machine is shared between rollout and training, and what that means for schedule and world.

A design knows no world; `place` turns it into the Settings of the unchanged schedule and the World that runs them.
Designs are compared at equal mean staleness E[d] = phi + (mu - 1)/2: `points` lists the integer choices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gyre_hpc.errors import ConfigError
from gyre_hpc.schedule.settings import LaunchOrder, PolicyName, Settings
from gyre_hpc.simulate.presets import WorldConfig
from gyre_hpc.simulate.world import EngineModel, Place, SwitchCosts, TrainingModel, World, even_cells


@dataclass(frozen=True)
class Design:
    """One way to run the job."""

    policy: PolicyName
    cells: int = 1
    """Equal cells that change roles; async has one of each role."""
    pool_nodes: float = 0.0
    """Nodes that always serve rollout, outside the cells."""
    training_nodes: float = 0.0
    """Nodes fixed to training (async)."""
    steps_per_burst: int = 4
    """mu."""
    extra_dispatch: float = 0.0
    """phi."""
    streaming: bool = True
    launch_order: LaunchOrder = LaunchOrder.FIFO
    overlap_joins: bool = False

    @property
    def staleness(self) -> float:
        """E[d], the mean scheduling staleness in steady state."""
        return self.extra_dispatch + (self.steps_per_burst - 1) / 2


def points(design: Design, staleness: float, batch_groups: int) -> Iterator[Design]:
    """The design at each (mu, phi) of this E[d] with phi*B whole."""
    steps = 1
    while (steps - 1) / 2 <= staleness + 1e-9:
        ahead = staleness - (steps - 1) / 2
        if abs(ahead * batch_groups - round(ahead * batch_groups)) < 1e-6:
            yield replace(design, steps_per_burst=steps, extra_dispatch=ahead)
        steps += 1


def splits(design: Design, nodes: float, parts: int) -> Iterator[Design]:
    """The design at each split of the nodes into training and rollout, in `parts` steps."""
    for part in range(1, parts):
        yield replace(design, training_nodes=nodes * part / parts)


def place(design: Design, config: WorldConfig, steps: int) -> tuple[Settings, World]:
    """(settings, world) of a run of this many steps. Raises ConfigError if the design does not fit the machine."""
    cells, pool = _places(design, config)
    world = World(
        cells=cells,
        pool=pool,
        engine=EngineModel(config.saturation, config.tool_share, config.prefill_s),
        training=TrainingModel(config.micro_step_s, config.fill_s, config.step_s),
        switch=SwitchCosts({"join": config.to_training_s}, {"return": config.to_rollout_s}),
        publish_s=config.publish_s,
        launch_s=config.launch_s,
        evaluate_s=config.evaluate_s,
        limit_s=config.limit_h * 3600.0,
        faults=config.all_faults(),
    )
    settings = Settings(
        capacities=world.capacities,
        policy=design.policy,
        batch_groups=config.batch_groups,
        executions_per_group=config.executions_per_group,
        steps_per_burst=design.steps_per_burst,
        groups_ahead=round(design.extra_dispatch * config.batch_groups),
        steps=steps,
        streaming=design.streaming,
        launch_order=design.launch_order,
        overlap_joins=design.overlap_joins,
        pool=pool.capacity,
        training_cells=1 if design.policy is PolicyName.ASYNC else 0,
    )
    return settings, world


def _places(design: Design, config: WorldConfig) -> tuple[tuple[Place, ...], Place]:
    if design.policy is PolicyName.ASYNC:
        serving = config.nodes - design.training_nodes
        capacity = round(config.slots * serving / config.nodes)
        rest = round(config.slots) - capacity
        if design.training_nodes <= 0 or min(capacity, rest) < 1:
            raise ConfigError(
                f"training_nodes={design.training_nodes:g} of {config.nodes:g} leaves one role without nodes",
                fix=f"set training_nodes between 1 and {config.nodes - 1:g}",
            )
        return (Place(design.training_nodes, rest), Place(serving, capacity)), Place(0.0, 0)
    cells, pool = even_cells(config.nodes, design.cells, config.slots, design.pool_nodes)
    if min(place.nodes for place in cells) <= 0 or min(place.capacity for place in cells) < 1:
        raise ConfigError(
            f"{design.cells} cells and a pool of {design.pool_nodes:g} nodes do not fit {config.nodes:g} nodes"
            f" with {config.slots:g} slots",
            fix="use fewer cells or a smaller pool",
        )
    return cells, pool
