"""Settings of one schedule: what the state machine may know about the run, frozen with the state.

`Settings` is plain and serialisable so that a journaled state carries everything `decide` needs. `settings_from`
reads the `schedule` section of the configuration; capacities are per cell, in launch order, index 0 the first core.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from gyre_hpc.errors import ConfigError
from gyre_hpc.records import CellId
from gyre_hpc.schedule.protocol import CellKind

if TYPE_CHECKING:
    from gyre_hpc.config import ScheduleConfig


class PolicyName(enum.StrEnum):
    """The three ways cells may be shared between rollout and training."""

    GYRE = "gyre"
    COLOCATE = "colocate"
    ASYNC = "async"


class LaunchOrder(enum.StrEnum):
    """Which queued execution is launched next."""

    FIFO = "fifo"
    """In the order of dispatch."""
    LONGEST_FIRST = "longest_first"
    """The longest forecast first; the caller tells Forecast after each Dispatch."""


class Settings(msgspec.Struct, frozen=True):
    """One line per symbol of design section 5."""

    capacities: tuple[int, ...]
    """C_e of each of the K cells, in order."""
    policy: PolicyName = PolicyName.GYRE
    batch_groups: int = 4
    """B."""
    executions_per_group: int = 8
    """N."""
    steps_per_burst: int = 1
    """mu: batches of a burst."""
    groups_ahead: int = 0
    """phi*B."""
    oversample: int = 0
    """m: executions per group beyond N."""
    max_staleness: int = -1
    """Most steps between a group's stamp and the step that consumes it; -1 = ceil(2(phi + mu))."""
    max_void_bursts: int = 3
    """Bursts in a row without a step after which the run stops."""
    steps: int = 30
    """Optimizer steps of the run."""
    training_cells: int = 0
    """Cells fixed to training (async only)."""
    streaming: bool = True
    """Whether groups are taken before the whole burst is ready; gyre always streams."""
    launch_order: LaunchOrder = LaunchOrder.FIFO
    """Order of queued executions; never who is in a group, nor its stamp."""
    overlap_joins: bool = True
    """Whether several cells may be on their way to training at once; False: the next is sent when the one before has
    committed its join (gyre only)."""
    standalone: int = 0
    """Cells at the end of the order that serve for the whole run and never train: their capacity is C_s."""
    pool: int = 0
    """Executions served outside the cells for the whole run (C_s where the pool is no cells)."""
    evaluate_first: bool = False
    """Whether an EvaluationDue will come before the first dispatch and is waited for."""
    evaluate_last: bool = False
    """Whether an EvaluationDue will come after the last publication and is waited for."""

    def __post_init__(self) -> None:
        if not self.capacities or min(self.capacities) < 1:
            raise ConfigError(
                f"schedule: cell capacities {self.capacities} must be one positive number per cell",
                fix="set cluster.cells and engine.capacity to 1 or more",
            )
        if not 0 <= self.standalone < len(self.capacities):
            raise ConfigError(
                f"schedule: {self.standalone} standalone cells of {len(self.capacities)} leave no core",
                fix=f"set cluster.standalone to {len(self.capacities) - 1} or less",
            )

    def kind_of(self, cell: CellId) -> CellKind:
        """Kind of one of the run's own cells, whose ids are their places in the configured order."""
        pool = standalone_cells(len(self.capacities), self.standalone)
        return CellKind.STANDALONE if cell in pool else CellKind.OWN

    @property
    def executions_dispatched(self) -> int:
        """Executions minted per group: N + m."""
        return self.executions_per_group + self.oversample

    @property
    def queue_groups(self) -> int:
        """Groups in the ledger right after a dispatch: (phi + mu) * B."""
        return self.groups_ahead + self.steps_per_burst * self.batch_groups

    @property
    def staleness_limit(self) -> int:
        """`max_staleness` with its default filled in."""
        twice_the_span = -(-2 * self.queue_groups // self.batch_groups)
        return twice_the_span if self.max_staleness < 0 else self.max_staleness


def standalone_cells(cells: int, standalone: int) -> range:
    """Indices of the standalone pool among the run's own `cells`: the last. Guests come behind them."""
    return range(cells - standalone, cells)


def settings_from(
    schedule: ScheduleConfig,
    capacities: tuple[int, ...],
    *,
    evaluate_first: bool = False,
    evaluate_last: bool = False,
    standalone: int = 0,
    pool: int = 0,
) -> Settings:
    """Settings of a run from the `schedule` section. Raises ConfigError naming the key."""
    ahead = schedule.extra_dispatch * schedule.batch_groups
    if abs(ahead - round(ahead)) > 1e-9:
        raise ConfigError(
            f"schedule.extra_dispatch={schedule.extra_dispatch}: phi*B = {ahead} is not an integer",
            fix=f"use a multiple of 1/{schedule.batch_groups}",
        )
    return Settings(
        capacities=capacities,
        policy=PolicyName(schedule.policy),
        batch_groups=schedule.batch_groups,
        executions_per_group=schedule.executions_per_group,
        steps_per_burst=schedule.steps_per_burst,
        groups_ahead=round(ahead),
        oversample=schedule.oversample,
        max_staleness=schedule.max_staleness,
        max_void_bursts=schedule.max_void_bursts,
        steps=schedule.steps,
        training_cells=_training_cells(schedule, len(capacities), standalone),
        streaming=schedule.streaming,
        launch_order=LaunchOrder(schedule.launch_order),
        overlap_joins=schedule.overlap_joins,
        standalone=standalone,
        pool=pool,
        evaluate_first=evaluate_first,
        evaluate_last=evaluate_last,
    )


def _training_cells(schedule: ScheduleConfig, cells: int, standalone: int) -> int:
    """Cells fixed to training: as configured, else half of them; those of the standalone pool stay in rollout, at least one."""
    if schedule.policy != PolicyName.ASYNC:
        return 0
    most = cells - max(1, standalone)
    if schedule.training_cells > most:
        raise ConfigError(
            f"schedule.training_cells={schedule.training_cells} of {cells} cells, of which {max(1, standalone)} must serve",
            fix=f"set schedule.training_cells to {most} or less",
        )
    return schedule.training_cells or min(most, max(1, cells // 2))
