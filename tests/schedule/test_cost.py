"""What an event costs does not grow with the number of executions and groups in the ledger."""

from __future__ import annotations

import time

from gyre_hpc.records import ClosingReason, ExecutionId, GroupId
from gyre_hpc.schedule.machine import decide
from gyre_hpc.schedule.protocol import AnyEvent, GroupReady, Terminated
from gyre_hpc.schedule.state import State

from .script import Script

FEW, MANY = 3, 65
"""Groups of 8 executions, one of them ended: 16 and 512 live ones."""
BOUND = 1.5
"""Most that many may cost over few; copying all executions and scanning all groups per event costs 2.4."""


def rolling_out(groups: int) -> tuple[State, list[AnyEvent]]:
    """A burst of these groups, all running but the last one's, which have ended; and what may happen next."""
    run = Script(batch_groups=groups, capacities=(4 * groups, 4 * groups))
    run.start()
    members = [run.state.groups[GroupId(group)].executions for group in range(groups)]
    ended = groups - 1
    run.end(*members[ended])
    events: list[AnyEvent] = [_ends(members[0][index]) for index in range(8)]
    return run.state, [*events, GroupReady(GroupId(ended), 4)]


def _ends(id_: ExecutionId) -> Terminated:
    return Terminated(id_, ClosingReason.COMPLETED)


def seconds(state: State, events: list[AnyEvent]) -> float:
    """Of each event once, from the same state."""
    begin = time.perf_counter()
    for event in events:
        decide(state, event)
    return time.perf_counter() - begin


def test_an_event_costs_about_the_same_with_16_and_with_512_live_executions() -> None:
    few, many = rolling_out(FEW), rolling_out(MANY)
    assert (few[0].waterlevel, many[0].waterlevel) == (16, 512)
    rounds = [(seconds(*few), seconds(*many)) for _ in range(300)]
    least_few, least_many = (min(column) for column in zip(*rounds, strict=True))
    assert least_many < BOUND * least_few
