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
    """How cells share a batch's work: by claims of micro-steps, or as a fluid, the limit of ever smaller ones."""

    micro_step_s: float = 0.0
    """Seconds an average cell needs for a micro-step; 0: a fluid in proportion to the cells' nodes."""
    fill_s: float = 0.0
    """Pipeline fill and drain, once per batch."""
    step_s: float = 0.0
    """Contributions, gradient norm and optimizer update, once per batch."""
    snapshot_s: float = 0.0
    """From a step inside a burst until satellites hold its weights and may claim again."""


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
    warned: bool = True
    """Whether the newest version is written before the end; else the last checkpoint counts."""


class EvaluatorOutage(Fault, tag="evaluator_outage", frozen=True):
    """Nothing is scored for this long; executions that ended meanwhile are scored at its end."""

    seconds: float


AnyFault = CellLoss | Preemption | EvaluatorOutage


def wall_time(
    limit_s: float, back_after_s: float, jobs: int, restore_s: float = 60.0
) -> tuple[Preemption, ...]:
    """Ends of a run that `jobs` jobs of this wall time carry on, each queued for `back_after_s`."""
    starts = (job * (limit_s + back_after_s) for job in range(jobs - 1))
    return tuple(Preemption(start + limit_s, back_after_s, restore_s) for start in starts)


class Place(msgspec.Struct, frozen=True):
    """A cell: its nodes and the executions it serves at once."""

    nodes: float
    capacity: int
    start_s: float = 0.0
    """From the start of the run until its engine serves for the first time."""


class World(msgspec.Struct, frozen=True):
    """One machine. `cells[i]` is cell i of the order; the standalone pool serves rollout for ever."""

    cells: tuple[Place, ...]
    pool: Place = Place(0.0, 0)
    engine: EngineModel = EngineModel()
    training: TrainingModel = TrainingModel()
    switch: SwitchCosts = SwitchCosts()
    publish_s: float = 0.0
    checkpoint_every: int = 1
    """Publications between two checkpoints: where a lost core goes on."""
    heldout: int = 0
    """Executions of a held-out evaluation. `Settings` says whether one comes before the first and after the last step."""
    evaluate_every: int = 0
    """Publications between two evaluations; 0: none in between."""
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
