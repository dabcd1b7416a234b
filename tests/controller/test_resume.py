"""What a resumed controller does with each execution, by how far it had come."""

from __future__ import annotations

import msgspec

from gyre_hpc.config import TasksConfig
from gyre_hpc.controller.executions import resume
from gyre_hpc.controller.journal.history import History
from gyre_hpc.records import Assessment, CellId, ClosingReason, ExecutionId, GroupId
from gyre_hpc.schedule import protocol as p
from gyre_hpc.schedule.machine import decide, initial_state
from gyre_hpc.schedule.settings import Settings
from gyre_hpc.schedule.state import State
from gyre_hpc.transport import messages as msg
from tests.controller.test_executions import World as Executions

SETTINGS = Settings(capacities=(2, 2), batch_groups=1, executions_per_group=4)
FIRST, SECOND = ExecutionId(0), ExecutionId(1)


def launched() -> State:
    """Four executions of one group, all launched."""
    state = initial_state(SETTINGS)
    ready = [p.CellReady(CellId(cell), p.Role.ROLLOUT) for cell in (0, 1)]
    events: list[p.AnyEvent] = [p.Started(), *ready]
    for event in events:
        state, _ = decide(state, event)
    assert len(state.executions) == 4 and not state.queued
    return state


def resumed(history: History) -> Executions:
    world = Executions()
    world.table.executions.clear()
    resume.register_executions(world.table, history, TasksConfig(), lambda group: f"toy:{group}")
    resume.go_on(world.table, history, lambda text: None)
    return world


def started(world: Executions) -> dict[int, int]:
    """Execution -> attempt, of all starts."""
    starts = [message for message in world.runner if isinstance(message, msg.StartExecution)]
    return {message.execution: message.attempt for message in starts}


def test_a_launch_that_was_decided_but_never_made_is_made() -> None:
    assert started(resumed(History(launched()))) == {0: 1, 1: 1, 2: 1, 3: 1}


def test_what_ran_is_repeated_as_another_attempt() -> None:
    history = History(launched(), attempts={FIRST: (2, GroupId(0), "toy:0")})
    assert started(resumed(history))[FIRST] == 3


def test_what_is_finished_stays_finished() -> None:
    reason = ClosingReason.COMPLETED
    done = msg.ExecutionOutcome(FIRST, 1, GroupId(0), "toy:0", reason, 1.0, False, None)
    history = History(launched(), attempts={FIRST: (1, GroupId(0), "toy:0")}, outcomes={FIRST: done})
    world = resumed(history)
    assert FIRST not in started(world) and not world.outcomes


def ended(reason: ClosingReason, calls: int = 3) -> History:
    """The first execution was closed, sealed and terminated, but has no outcome."""
    state, _ = decide(launched(), p.Terminated(FIRST, reason))
    closed = msg.ExecutionClosed(FIRST, 1, reason, 7.0, None, "")
    sealed = msg.ExecutionSealed(FIRST, 1, calls, 0, 0, 10, 0, 100, 0.0, False, False)
    return History(
        state,
        attempts={FIRST: (1, GroupId(0), "toy:0")},
        closed={FIRST: closed},
        sealed={FIRST: sealed},
        terminated={FIRST: reason},
        launched={FIRST},
    )


def test_what_ended_unassessed_is_assessed_and_keeps_its_reason() -> None:
    world = resumed(ended(ClosingReason.HARNESS_TIMEOUT))
    assert [message for message in world.runner if isinstance(message, msg.AssessExecution)]
    world.table.assessed(msg.ExecutionAssessed(FIRST, 1, Assessment(0.5, True, "")))
    assert (world.outcomes[0].reason, world.outcomes[0].wall_s) == (ClosingReason.HARNESS_TIMEOUT, 7.0)


def test_what_was_excluded_is_neither_assessed_nor_repeated() -> None:
    world = resumed(ended(ClosingReason.OVERALL_TIMEOUT))
    assert [item.reason for item in world.outcomes] == [ClosingReason.OVERALL_TIMEOUT]
    assert FIRST not in started(world)


def test_what_was_withdrawn_ends_as_surplus() -> None:
    state = launched()
    withdrawn = msgspec.structs.replace(state.executions[SECOND], withdrawn=True)
    state = msgspec.structs.replace(state, executions=state.executions | {SECOND: withdrawn})
    world = resumed(History(state, attempts={SECOND: (1, GroupId(0), "toy:0")}, launched={SECOND}))
    assert [(item.execution, item.reason) for item in world.outcomes] == [
        (SECOND, ClosingReason.CANCELLED_SURPLUS)
    ]
    assert SECOND not in started(world)
