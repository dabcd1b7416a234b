"""A hand-written run: tells events to the machine and remembers the decisions of the last turn."""

from __future__ import annotations

from gyre_hpc.records import CellId, ClosingReason, ExecutionId, GroupId, Version
from gyre_hpc.schedule.machine import decide, initial_state
from gyre_hpc.schedule.protocol import (
    AnyDecision,
    AnyEvent,
    BatchDone,
    CellReady,
    GroupReady,
    MicroSteps,
    Published,
    Role,
    Started,
    Terminated,
)
from gyre_hpc.schedule.settings import Settings
from gyre_hpc.schedule.state import CellRole


class Script:
    """`quickstart`: B=4, N=8, mu=1, phi=0, three cells of 11 executions."""

    def __init__(self, **changes: object) -> None:
        plan = {
            "capacities": (11, 11, 11),
            "batch_groups": 4,
            "executions_per_group": 8,
            "steps": 3,
            **changes,
        }
        self.state = initial_state(Settings(**plan))  # type: ignore[arg-type]
        self.said: tuple[AnyDecision, ...] = ()

    def tell(self, *events: AnyEvent) -> list[AnyDecision]:
        """The decisions of all these events."""
        heard: list[AnyDecision] = []
        for event in events:
            self.state, decisions = decide(self.state, event)
            heard += decisions
        self.said = tuple(heard)
        return heard

    def heard(self, kind: type) -> list[AnyDecision]:
        """Decisions of this kind in the last call."""
        return [decision for decision in self.said if isinstance(decision, kind)]

    def start(self) -> list[AnyDecision]:
        """Started, and every cell serves."""
        return self.tell(Started(), *(CellReady(cell.id, Role.ROLLOUT) for cell in self.state.cells))

    def end(self, *ids: int) -> list[AnyDecision]:
        """These executions complete."""
        return self.tell(*(Terminated(ExecutionId(id_), ClosingReason.COMPLETED) for id_ in ids))

    def end_group(self, group: int, micro_steps: int = 4) -> list[AnyDecision]:
        """All executions of the group complete and it becomes ready."""
        ids = self.state.groups[GroupId(group)].executions
        return self.end(*ids) + self.tell(GroupReady(GroupId(group), micro_steps))

    def trains(self, *cells: int) -> list[AnyDecision]:
        """These cells finished their switch to training."""
        return self.tell(*(CellReady(CellId(cell), Role.TRAINING) for cell in cells))

    def work_off(self) -> list[AnyDecision]:
        """Every micro-step is claimed and done."""
        return self.tell(MicroSteps(0, 0))

    def step(self) -> list[AnyDecision]:
        """The closed batch is committed with a step."""
        return self.tell(BatchDone(stepped=True))

    def publish(self) -> list[AnyDecision]:
        """The awaited version is served everywhere."""
        return self.tell(Published(Version(self.state.version)))

    def roles(self) -> list[CellRole]:
        """Roles in order."""
        return [cell.role for cell in self.state.cells]

    def first_step(self) -> None:
        """A whole burst up to its publication: all cells train, one step."""
        self.start()
        for group in list(self.state.groups):
            self.end_group(group)
        self.trains(*(cell.id for cell in self.state.cells if cell.role is CellRole.JOINING))
        self.work_off()
        self.step()
