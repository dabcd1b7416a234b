"""Launch order and overlap of joins, told by hand."""

from __future__ import annotations

import math

import msgspec
import pytest

from gyre_hpc.errors import IllegalTransition
from gyre_hpc.records import CellId, ExecutionId, GroupId, Version
from gyre_hpc.schedule.machine import decide
from gyre_hpc.schedule.protocol import (
    AllCellsLost,
    AnyEvent,
    BatchDone,
    CellAdded,
    CellLost,
    CellUnroutable,
    Dispatch,
    EndBurst,
    EvaluationDue,
    Forecast,
    GroupDead,
    GroupReady,
    Launch,
    LaunchEvaluation,
    MicroSteps,
    ToTraining,
)
from gyre_hpc.schedule.settings import LaunchOrder
from gyre_hpc.schedule.state import CellRole, State

from .script import Script


def forecast(*seconds: float) -> Forecast:
    """Of groups 0, 1, ... in order."""
    return Forecast(tuple((GroupId(group), value) for group, value in enumerate(seconds)))


def launches(*ids: int) -> Launch:
    return Launch(tuple(ExecutionId(id_) for id_ in ids))


def longest_first(**changes: object) -> Script:
    """Two executions per group, three slots."""
    plan = {
        "executions_per_group": 2,
        "capacities": (3,),
        "launch_order": LaunchOrder.LONGEST_FIRST,
        **changes,
    }
    return Script(**plan)


def test_executions_wait_for_the_forecast_of_their_group() -> None:
    run = longest_first()
    assert not [said for said in run.start() if isinstance(said, Launch)]
    assert run.state.unforecast == (0, 1, 2, 3) and run.state.waterlevel == 8
    assert run.tell(Forecast(((GroupId(1), 5.0),))) == [launches(2, 3)]
    assert run.state.unforecast == (0, 2, 3)


def test_the_longest_forecast_is_launched_first_and_ties_go_by_id() -> None:
    run = longest_first()
    run.start()
    assert run.tell(forecast(1.0, 7.0, 7.0, 9.0)) == [launches(6, 7, 2)]
    assert [run.end(id_) for id_ in (2, 6, 7)] == [[launches(3)], [launches(4)], [launches(5)]]
    assert run.end(3, 4) == [launches(0), launches(1)]


def test_a_forecast_told_again_changes_nothing_whatever_it_says() -> None:
    run = longest_first()
    run.start()
    run.tell(forecast(1.0, 2.0, 3.0, 4.0))
    before = run.state
    assert run.tell(forecast(4.0, 3.0, 2.0, 1.0)) == [] and run.state == before


def test_under_fifo_nothing_waits_and_a_forecast_changes_nothing() -> None:
    run = longest_first(launch_order=LaunchOrder.FIFO)
    assert run.start()[-1] == launches(0, 1, 2)
    before = run.state
    assert run.tell(forecast(1.0, 2.0, 3.0, 4.0)) == [] and run.state == before


def test_a_later_dispatch_is_sorted_into_the_queue() -> None:
    run = longest_first(batch_groups=1, groups_ahead=1, capacities=(1,))
    run.start()
    run.tell(forecast(4.0, 2.0))
    run.end(0, 1)
    run.tell(GroupReady(GroupId(0), 0), BatchDone(stepped=False))
    assert run.state.queued == (3,) and run.state.unforecast == (2,)
    run.tell(Forecast(((GroupId(2), 3.0),)))
    assert run.state.queued == (4, 5, 3)


def test_held_out_executions_wait_until_all_groups_are_queued() -> None:
    run = longest_first(capacities=(9,))
    run.start()
    assert run.tell(EvaluationDue(Version(0), 1)) == []
    assert run.tell(forecast(1.0, 1.0, 1.0, 1.0)) == [
        launches(*range(8)),
        LaunchEvaluation((ExecutionId(8),), Version(0)),
    ]


def test_no_cell_joins_before_all_groups_are_queued() -> None:
    run = longest_first(capacities=(2, 2, 2), batch_groups=1, groups_ahead=1, steps=4)
    run.start()
    run.tell(EvaluationDue(Version(0), 1), forecast(1.0, 1.0))
    run.end_group(0, micro_steps=1)
    run.trains(0)
    run.tell(MicroSteps(0, 1))
    run.end(4)
    run.end_group(1)
    run.work_off()
    run.step()
    assert [type(said) for said in run.publish()] == [EndBurst, Dispatch]
    assert run.tell(Forecast(((GroupId(2), 1.0),))) == [launches(5, 6), ToTraining(CellId(1))]


def test_a_group_that_leaves_before_its_forecast_is_awaited_no_more() -> None:
    run = longest_first()
    run.start()
    run.end(0, 1)
    run.tell(GroupDead(GroupId(0), "no runner"))
    assert run.state.unforecast == (1, 2, 3)
    assert run.tell(forecast(9.0, 1.0, 2.0, 3.0)) == [launches(6, 7, 4)]


def test_a_caller_that_resumes_finds_in_the_state_what_it_must_forecast() -> None:
    run = longest_first()
    run.start()
    state = msgspec.json.decode(msgspec.json.encode(run.state), type=State)
    event = msgspec.json.decode(msgspec.json.encode(forecast(1.0, 2.0, 3.0, 4.0)), type=AnyEvent)
    state, _ = decide(state, AllCellsLost())
    state, _ = decide(state, CellAdded(CellId(0), 3))
    assert state.unforecast == (0, 1, 2, 3)
    state, decisions = decide(state, event)
    assert decisions == (launches(6, 7, 4),) and not state.unforecast


@pytest.mark.parametrize("wrong", [Forecast(((GroupId(9), 1.0),)), forecast(-1.0), forecast(math.inf)])
def test_a_forecast_that_no_correct_caller_sends_names_its_group(wrong: Forecast) -> None:
    run = longest_first()
    run.start()
    with pytest.raises(IllegalTransition, match=r"group \d: .* forecast"):
        run.tell(wrong)


def test_without_overlap_the_next_cell_is_sent_when_the_one_before_has_joined() -> None:
    run = Script(overlap_joins=False)
    run.start()
    for group in range(4):
        run.end_group(group)
    assert run.roles() == [CellRole.JOINING, CellRole.ROLLOUT, CellRole.ROLLOUT], "w = 0: all could leave"
    assert run.trains(0) == [ToTraining(CellId(1))]
    assert run.trains(1) == [ToTraining(CellId(2))]


def test_without_overlap_the_loss_of_a_joining_cell_lets_the_next_one_go() -> None:
    run = Script(overlap_joins=False)
    run.start()
    for group in range(4):
        run.end_group(group)
    run.trains(0)
    assert run.tell(CellUnroutable(CellId(1), "switch failed")) == []
    assert run.tell(CellLost(CellId(1))) == [ToTraining(CellId(2))]
