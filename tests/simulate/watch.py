"""Stands between the simulator and the schedule and checks every turn by the schedule's own laws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast
from unittest import mock

from gyre_hpc.records import ExecutionId
from gyre_hpc.schedule import machine
from gyre_hpc.schedule.protocol import AllCellsLost, AnyDecision, AnyEvent, CellLost, Dispatch, Terminated
from gyre_hpc.schedule.state import State
from gyre_hpc.simulate import simulator
from tests.schedule.laws import ALL
from tests.schedule.world import Nature, Turned, World


@dataclass
class Watch:
    """What the laws need to know of a world. `turns` counts what was checked."""

    nature: Nature
    ended: list[ExecutionId] = field(default_factory=list)
    capacity_lost: bool = False
    turns: int = 0
    state: State | None = None
    journal: list[tuple[AnyEvent, tuple[AnyDecision, ...]]] = field(default_factory=list)

    def decide(self, state: State, event: AnyEvent) -> tuple[State, tuple[AnyDecision, ...]]:
        if isinstance(event, Terminated) and event.id in state.executions:
            self.ended.append(event.id)
        self.capacity_lost = self.capacity_lost or isinstance(event, CellLost | AllCellsLost)
        after, decisions = machine.decide(state, event)
        turned = Turned(state, event, after, decisions, cast(World, self))
        for law in ALL if not state.finished else ():
            law(turned)
        if any(isinstance(decision, Dispatch) for decision in decisions):
            self.capacity_lost = False
        self.turns += 1
        self.state = after
        self.journal.append((event, decisions))
        return after, decisions


@contextmanager
def watched(*, losses: int = 0) -> Iterator[Watch]:
    """Every `decide` of simulations in this block is checked."""
    watch = Watch(Nature(losses=losses))
    with mock.patch.object(simulator, "decide", watch.decide):
        yield watch
