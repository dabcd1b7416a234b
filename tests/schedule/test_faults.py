"""Losing capacity, the core, and events no correct caller sends."""

from __future__ import annotations

import pytest

from gyre_hpc.errors import ConfigError, IllegalTransition
from gyre_hpc.records import CellId, ExecutionId, GroupId, Version
from gyre_hpc.schedule.protocol import (
    AllCellsLost,
    AnyEvent,
    BatchDone,
    CellAdded,
    CellLost,
    CellReady,
    CellRoutable,
    CellUnroutable,
    CloseBatch,
    CloseJoinWindow,
    CoreRestored,
    Dispatch,
    EndBurst,
    EvaluationDue,
    GroupDead,
    GroupReady,
    Launch,
    Launched,
    MicroSteps,
    Publish,
    Published,
    RestoreCore,
    Role,
    Started,
    ToRollout,
    ToTraining,
)
from gyre_hpc.schedule.state import CellRole, GroupStatus

from .script import Script


def one_trains() -> Script:
    """Core in training, w = 16, both satellites serving."""
    run = Script()
    run.start()
    run.end_group(0)
    run.end_group(1)
    run.trains(0)
    return run


def test_an_unroutable_cell_takes_its_capacity_along_at_once_and_brings_it_back() -> None:
    run = Script(batch_groups=5)
    run.start()
    run.tell(CellUnroutable(CellId(2), "suspect"))
    assert run.state.rollout_capacity == 22
    assert run.end(0) == [], "32 run on 22 slots: nothing is launched"
    run.end(*range(1, 12))
    assert len(run.tell(CellRoutable(CellId(2)))) == 1 and run.heard(Launch)


def test_an_unroutable_cell_does_not_leave_rollout() -> None:
    run = Script()
    run.start()
    run.end_group(0)
    run.tell(CellUnroutable(CellId(0), "engine restart"))
    assert run.end(*range(8, 30)) == []
    assert ToTraining(CellId(0)) in run.tell(CellReady(CellId(0), Role.ROLLOUT))


def test_after_the_loss_of_a_serving_cell_training_cells_return_until_the_waterlevel_fits() -> None:
    run = one_trains()
    assert run.tell(CellUnroutable(CellId(2), "suspect")) == [], "SUSPECT is not LOST"
    assert run.tell(CellLost(CellId(2))) == [ToRollout(CellId(0))]
    assert run.tell(MicroSteps(8, 0)) == []
    run.tell(CellReady(CellId(0), Role.ROLLOUT))
    assert run.end(*range(16, 20)) == [], "w = 12 > 22 - 11"
    assert run.end(20) == [ToTraining(CellId(0))]


def test_training_cells_return_at_once_when_no_capacity_is_left() -> None:
    run = one_trains()
    run.tell(CellUnroutable(CellId(1), "suspect"))
    assert run.tell(CellUnroutable(CellId(2), "suspect")) == [ToRollout(CellId(0))]


def test_the_core_returns_last() -> None:
    run = Script(capacities=(4, 4, 4), batch_groups=1, executions_per_group=6, groups_ahead=1, steps=2)
    run.start()
    run.end_group(0)
    run.end(6, 7)
    run.trains(0, 1)
    assert run.roles() == [CellRole.TRAINING, CellRole.TRAINING, CellRole.ROLLOUT]
    assert run.tell(CellLost(CellId(2))) == [ToRollout(CellId(1))], "w = 4 fits the satellite"


def test_a_stepping_core_finishes_its_step_before_it_gives_way() -> None:
    run = Script(batch_groups=1, steps_per_burst=2, executions_per_group=2, capacities=(2, 2), steps=4)
    run.start()
    run.end_group(0)
    run.trains(0)
    assert run.work_off() == [CloseJoinWindow(), CloseBatch()]
    assert run.tell(CellLost(CellId(1))) == []
    assert run.step() == [ToRollout(CellId(0))], "w = 2, and nothing else serves"


def test_a_returning_cell_that_failed_to_load_does_not_count_as_coming_back() -> None:
    run = Script(batch_groups=1, groups_ahead=1)
    run.start()
    run.end_group(0)
    run.trains(0)
    run.end_group(1)
    run.trains(1, 2)
    run.work_off()
    run.step()
    run.publish()
    assert run.roles()[:2] == [CellRole.TRAINING, CellRole.RETURNING] and run.state.waterlevel == 8
    assert run.tell(CellUnroutable(CellId(1), "quarantined")) == []
    assert run.tell(CellLost(CellId(2))) == [ToRollout(CellId(0))]


def test_another_cell_takes_the_work_of_one_whose_switch_failed() -> None:
    run = Script()
    run.start()
    run.end(*range(32))
    assert run.tell(GroupReady(GroupId(3), 1)) == [ToTraining(CellId(0))]
    assert run.tell(CellUnroutable(CellId(0), "blocked")) == [ToTraining(CellId(1))]


def test_the_loss_of_a_training_satellite_only_renumbers_the_order() -> None:
    run = Script()
    run.start()
    for group in range(4):
        run.end_group(group)
    run.trains(0, 1, 2)
    assert run.tell(CellLost(CellId(1))) == []
    assert [cell.id for cell in run.state.cells] == [0, 2] and run.state.trainers == (0, 2)


def test_a_core_that_returned_comes_back_to_step_even_when_no_micro_step_is_left() -> None:
    run = Script(batch_groups=1, executions_per_group=2, groups_ahead=1, capacities=(2, 2), steps=2)
    run.start()
    run.end_group(0)
    run.trains(0)
    assert run.tell(CellLost(CellId(1)), MicroSteps(0, 0)) == [ToRollout(CellId(0)), CloseJoinWindow()]
    run.tell(CellReady(CellId(0), Role.ROLLOUT))
    run.end(2)
    assert run.end(3) == [ToTraining(CellId(0))]
    assert run.trains(0) == [CloseBatch()]


def test_after_the_loss_of_the_core_the_open_batch_is_void_and_nothing_trains_before_its_restore() -> None:
    run = one_trains()
    lost = run.state.open_batch
    assert lost is not None and run.tell(CellLost(CellId(0))) == [RestoreCore(CellId(1))]
    assert run.state.core == 1 and run.state.open_batch is None
    assert {group.status for group in run.state.groups.values()} == {GroupStatus.READY, GroupStatus.PENDING}
    run.end_group(2)
    run.end_group(3)
    assert run.said == ()
    assert run.tell(CoreRestored(Version(0))) == [ToTraining(CellId(1)), ToTraining(CellId(2))]
    batch = run.state.open_batch
    assert batch is not None and batch.index == lost.index + 1 and batch.groups == (0, 1, 2, 3)


def test_steps_above_the_checkpoint_are_undone_and_their_versions_never_used_again() -> None:
    run = Script(batch_groups=2, steps_per_burst=2, steps=4)
    run.first_step()
    assert (run.state.version, run.state.steps_done, run.state.burst.steps) == (1, 1, 1)
    run.tell(CellLost(CellId(0)), CoreRestored(Version(0)))
    assert (run.state.version, run.state.steps_done, run.state.burst.steps) == (1, 0, 0)
    assert run.state.core_version == 0, "the core computes with the checkpoint's weights"
    assert run.state.open_batch is not None and run.state.open_batch.groups == (0, 1)
    run.work_off()
    run.step()
    assert run.state.core_version == run.state.version == 2
    run.work_off()
    assert run.step() == [Publish(Version(3))] and run.state.steps_done == 2


def test_a_core_lost_while_publishing_publishes_again_if_its_checkpoint_holds_the_step() -> None:
    run = Script()
    run.first_step()
    assert run.tell(CellLost(CellId(0)), Published(Version(1))) == [RestoreCore(CellId(1))]
    assert run.tell(CoreRestored(Version(1))) == [Publish(Version(1))]
    assert [type(decision) for decision in run.publish()][1] is Dispatch


def test_a_last_step_undone_during_the_last_evaluation_is_taken_again() -> None:
    run = Script(steps=1, evaluate_last=True)
    run.first_step()
    run.publish()
    run.tell(EvaluationDue(Version(1), 1), CellReady(CellId(1), Role.ROLLOUT))
    run.tell(CellLost(CellId(0)), CellReady(CellId(2), Role.ROLLOUT))
    run.end(32)
    assert run.said == (), "the end waits for the core"
    run.tell(CoreRestored(Version(0)))
    (dispatch,) = run.heard(Dispatch)
    assert isinstance(dispatch, Dispatch) and dispatch.version == 1 and run.state.steps_done == 0


def test_when_every_cell_is_lost_the_first_replacement_becomes_the_core() -> None:
    run = one_trains()
    assert run.tell(CellLost(CellId(1)), CellLost(CellId(2)), CellLost(CellId(0)))[-1:] == [
        ToRollout(CellId(0))
    ]
    assert run.state.core is None
    assert run.tell(CellAdded(CellId(1), 11), CellAdded(CellId(0), 11)) == [RestoreCore(CellId(1))]
    assert run.state.rollout_capacity == 22


def test_when_all_cells_end_at_once_none_is_asked_to_return() -> None:
    run = one_trains()
    assert run.tell(AllCellsLost()) == [] and run.state.cells == () and run.state.core is None
    assert run.tell(CellAdded(CellId(2), 11)) == [RestoreCore(CellId(2))]
    assert run.state.waterlevel == 16, "executions outlive the cells"


def test_the_first_cell_that_is_ready_replaces_a_core_that_never_started() -> None:
    run = Script()
    run.tell(Started())
    assert run.tell(CellLost(CellId(0))) == []
    assert run.tell(CellReady(CellId(2), Role.ROLLOUT))[0] == RestoreCore(CellId(2))
    assert [cell.id for cell in run.state.cells] == [2, 1], "the core leads the order"


def test_a_replacement_serves_at_the_end_of_the_order() -> None:
    run = one_trains()
    run.tell(CellLost(CellId(1)), CellAdded(CellId(1), 6))
    assert [cell.id for cell in run.state.cells] == [0, 2, 1]
    assert run.state.rollout_capacity == 17


def test_colocate_switches_all_cells_as_one_when_nothing_runs() -> None:
    run = Script(policy="colocate", streaming=False)
    run.start()
    for group in range(3):
        assert run.end_group(group) == []
    run.end(*range(24, 32))
    assert run.tell(GroupReady(GroupId(3), 4)) == [ToTraining(CellId(cell)) for cell in range(3)]
    run.trains(0, 1, 2)
    run.work_off()
    run.step()
    assert len(run.publish()) and len(run.heard(ToRollout)) == 3


def test_async_fixes_its_training_cells_before_the_first_dispatch_and_rollout_never_stops() -> None:
    run = Script(policy="async", training_cells=1, batch_groups=2, groups_ahead=2)
    said = run.start()
    assert [type(decision) for decision in said] == [ToTraining, Dispatch, Launch, Launch]
    assert run.state.rollout_capacity == 22
    run.trains(0)
    run.end_group(0)
    run.end_group(1)
    run.work_off()
    run.step()
    assert [type(decision) for decision in run.publish()] == [EndBurst, Dispatch, Launch]
    assert run.roles() == [CellRole.TRAINING, CellRole.ROLLOUT, CellRole.ROLLOUT]


def test_async_starts_even_if_its_first_training_cell_never_does() -> None:
    run = Script(policy="async", training_cells=2, capacities=(8, 8, 8, 8))
    run.tell(Started(), CellReady(CellId(2), Role.ROLLOUT), CellLost(CellId(0)))
    assert [type(decision) for decision in run.said] == [RestoreCore, Dispatch, Launch]


def test_async_without_a_serving_cell_lets_a_training_cell_serve() -> None:
    run = Script(policy="async", training_cells=1, capacities=(11, 11))
    run.start()
    run.trains(0)
    assert run.tell(CellLost(CellId(1))) == [ToRollout(CellId(0))]


def test_repeats_and_late_events_change_nothing() -> None:
    run = one_trains()
    before = run.state
    run.end(0, 0)
    run.tell(
        GroupReady(GroupId(0), 9),
        CellLost(CellId(7)),
        CellUnroutable(CellId(7), "gone"),
        Published(Version(0)),
    )
    run.trains(0)
    assert run.said == () and run.state == before


@pytest.mark.parametrize(
    "event",
    [
        Launched((ExecutionId(99),)),
        GroupReady(GroupId(3), 4),
        GroupReady(GroupId(9), 4),
        GroupDead(GroupId(0), "too late: a batch holds it"),
        MicroSteps(9, 0),
        MicroSteps(-1, 0),
        BatchDone(stepped=True),
        Published(Version(1)),
        CellReady(CellId(1), Role.TRAINING),
        CellReady(CellId(0), Role.ROLLOUT),
        CellAdded(CellId(1), 11),
        CoreRestored(Version(0)),
    ],
    ids=repr,
)
def test_events_no_correct_caller_sends_are_refused_and_say_what_to_do(event: AnyEvent) -> None:
    run = one_trains()
    with pytest.raises(IllegalTransition, match="fix: "):
        run.tell(event)


def test_a_launch_must_be_decided_before_it_is_reported() -> None:
    run = Script()
    run.tell(Started())
    with pytest.raises(IllegalTransition, match="execution 0: queued -> running"):
        run.tell(Launched((ExecutionId(0),)))


def test_a_cell_without_capacity_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.capacity"):
        Script(capacities=(11, 0))


def test_async_evaluates_at_the_end_even_if_only_training_cells_are_left() -> None:
    run = Script(
        policy="async", training_cells=1, capacities=(8, 8), batch_groups=1, steps=1, evaluate_last=True
    )
    run.start()
    run.trains(0)
    run.end_group(0)
    run.work_off()
    run.step()
    run.tell(CellLost(CellId(1)))
    assert run.publish() == [EndBurst(Version(1)), ToRollout(CellId(0))]
