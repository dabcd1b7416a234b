"""The simulated machine: cells, engine, trainer, costs and faults. Plain data; times in seconds, work in node-seconds.

A world says what the schedule must not know: how fast things go and what breaks when. What the schedule knows (B, N, mu,
phi, capacities) is `schedule.settings.Settings`; what the executions do is a workload (`workload.py`).
"""

from __future__ import annotations

import itertools

import msgspec

from gyre_hpc.errors import ConfigError


class EngineModel(msgspec.Struct, frozen=True):
    """How fast a running execution progresses, relative to an execution alone on a cell (a fluid model).

    Calls are spread evenly over the rollout cells. A cell's token rate grows with its executions up to `saturation` of
    its capacity and is flat from there on. An execution alternates between tools and model so often that both shares of
    its time are spent side by side.
    """

    saturation: float = 1.0
    """Share of a cell's capacity up to which each execution samples at full speed."""
    tool_share: float = 0.0
    """Share of an undisturbed execution's time that tools take, whatever the load."""
    prefill_s: float = 0.0
    """Progress an execution repeats when its cell leaves rollout without handing its KV pages on."""

    def pace(self, running: int, capacity: int) -> float:
        """Progress per second of each of `running` executions on rollout cells of this joint capacity, 0 to 1."""
        if capacity == 0:
            return 0.0
        room = self.saturation * capacity
        if running <= room:
            return 1.0
        return 1.0 / (self.tool_share + (1.0 - self.tool_share) * running / room)


class TrainingModel(msgspec.Struct, frozen=True):
    """Cells share a batch's work in proportion to their nodes, as claims of small micro-steps make them (a fluid model).

    When the last micro-step is claimed, n cells hold one each, at a random point of it: the last of them ends
    `micro_step * (n-1) / (2 (n+1))` after the fluid would have.
    """

    micro_step_s: float = 0.0
    """Seconds one cell needs for a micro-step."""
    fill_s: float = 0.0
    """Pipeline fill and drain, once per batch."""
    step_s: float = 0.0
    """Contributions, gradient norm and optimizer update, once per batch."""

    def tail_s(self, cells: int) -> float:
        """Seconds from the end of the fluid to the end of the batch on `cells` cells."""
        return self.fill_s + self.micro_step_s * (cells - 1) / (2 * (cells + 1)) if cells else self.fill_s


class SwitchCosts(msgspec.Struct, frozen=True):
    """Seconds of each phase of a role switch."""

    to_training: dict[str, float] = {}
    to_rollout: dict[str, float] = {}

    @property
    def join_s(self) -> float:
        """From the decision to the committed join."""
        return sum(self.to_training.values())

    @property
    def return_s(self) -> float:
        """From the decision to a routable engine."""
        return sum(self.to_rollout.values())

    def scaled(self, factor: float) -> SwitchCosts:
        """All phases that much longer."""
        return SwitchCosts(
            {name: seconds * factor for name, seconds in self.to_training.items()},
            {name: seconds * factor for name, seconds in self.to_rollout.items()},
        )


class Fault(msgspec.Struct, frozen=True, tag_field="fault"):
    """Base of all faults; `at_s` is when it strikes."""

    at_s: float


class CellLoss(Fault, tag="cell_loss", frozen=True):
    """A cell dies; a replacement serves `back_after_s` later (None: never). A new core loads its checkpoint in `restore_s`."""

    cell: int
    back_after_s: float | None = None
    restore_s: float = 60.0


class Preemption(Fault, tag="preemption", frozen=True):
    """The whole job ends (preemption, wall time) and is back after `back_after_s`; running executions start again."""

    back_after_s: float
    restore_s: float = 60.0


class EvaluatorOutage(Fault, tag="evaluator_outage", frozen=True):
    """Nothing is scored for this long; executions that ended meanwhile are scored at its end."""

    seconds: float


AnyFault = CellLoss | Preemption | EvaluatorOutage


class Place(msgspec.Struct, frozen=True):
    """A cell: its nodes and the executions it serves at once."""

    nodes: float
    capacity: int


class World(msgspec.Struct, frozen=True):
    """One machine. `cells[i]` is cell i of the order; the standalone pool serves rollout for ever."""

    cells: tuple[Place, ...]
    pool: Place = Place(0.0, 0)
    engine: EngineModel = EngineModel()
    training: TrainingModel = TrainingModel()
    switch: SwitchCosts = SwitchCosts()
    publish_s: float = 0.0
    launch_s: float = 0.0
    """Sandbox and harness start, before an execution's first call."""
    evaluate_s: float = 0.0
    """From an execution's end to its score."""
    limit_s: float = float("inf")
    """Harness time limit: an execution ends there and is scored."""
    faults: tuple[AnyFault, ...] = ()

    def __post_init__(self) -> None:
        if not self.cells or min(place.nodes for place in self.cells) <= 0:
            raise ConfigError(
                "world: every cell needs nodes", fix="give each cell a positive number of nodes"
            )

    @property
    def nodes(self) -> float:
        """All nodes, the pool's included."""
        return self.pool.nodes + sum(place.nodes for place in self.cells)

    @property
    def capacities(self) -> tuple[int, ...]:
        """Executions per cell, for `Settings.capacities`."""
        return tuple(place.capacity for place in self.cells)


def even_cells(
    nodes: float, cells: int, slots: float, pool_nodes: float = 0.0
) -> tuple[tuple[Place, ...], Place]:
    """(cells, pool) of a machine with `slots` executions on all `nodes`: equal cells and a standalone pool.

    Capacities are whole numbers that add up to the slots, so those of two cells may differ by one.
    """
    per_node = slots / nodes
    pool = Place(pool_nodes, round(per_node * pool_nodes))
    own = (nodes - pool_nodes) / cells
    ends = [round((slots - pool.capacity) * i / cells) for i in range(cells + 1)]
    return tuple(Place(own, end - begin) for begin, end in itertools.pairwise(ends)), pool
