"""A burst from dispatch to publication, told by hand on the quickstart's shape: B=4, N=8, three cells of 11."""

from __future__ import annotations

from gyre_hpc.records import CellId, ExecutionId, GroupId, Version
from gyre_hpc.schedule.protocol import (
    BatchDone,
    CellReady,
    CellRoutable,
    CellUnroutable,
    CloseBatch,
    CloseJoinWindow,
    Dispatch,
    EndBurst,
    EvaluationDue,
    GroupDead,
    GroupReady,
    Launch,
    LaunchEvaluation,
    MicroSteps,
    Outcome,
    Publish,
    Published,
    Role,
    Started,
    Stop,
    ToRollout,
    ToTraining,
    Withdraw,
    WriteOff,
)
from gyre_hpc.schedule.state import CellRole, Phase

from .script import Script


def test_nothing_is_decided_before_the_run_has_started() -> None:
    run = Script(policy="async", training_cells=1)
    assert run.tell(CellReady(CellId(0), Role.ROLLOUT), CellReady(CellId(1), Role.ROLLOUT)) == []
    assert run.tell(EvaluationDue(Version(0), 1)) == []
    assert run.tell(Started()) == [
        LaunchEvaluation((ExecutionId(0),), Version(0)),
        ToTraining(CellId(0)),
    ]


def test_the_first_dispatch_fills_the_queue_and_launches_follow_capacity() -> None:
    run = Script()
    run.tell(Started())
    (dispatch,) = run.heard(Dispatch)
    assert isinstance(dispatch, Dispatch) and dispatch.version == 0
    assert [len(group.executions) for group in dispatch.groups] == [8, 8, 8, 8]
    assert run.state.waterlevel == 32 and not run.heard(Launch)
    assert run.tell(CellReady(CellId(1), Role.ROLLOUT)) == [Launch(tuple(ExecutionId(i) for i in range(11)))]
    run.tell(CellReady(CellId(0), Role.ROLLOUT), CellReady(CellId(2), Role.ROLLOUT))
    assert (run.state.dispatched, run.state.launched, run.state.rollout_capacity) == (32, 32, 33)


def test_cells_leave_one_by_one_as_the_waterlevel_falls_past_their_capacity() -> None:
    run = Script()
    run.start()
    run.end_group(0)
    assert run.end(8) == [], "w = 23 > 33 - 11"
    assert run.end(9) == [ToTraining(CellId(0))], "w = 22 = 33 - 11"
    assert run.end(*range(10, 20)) == [], "w = 12 > 22 - 11"
    assert run.end(20) == [ToTraining(CellId(1))], "w = 11 = 22 - 11"
    assert run.end(*range(21, 31)) == []
    assert run.end(31) == [ToTraining(CellId(2))], "w = 0"


def test_no_cell_leaves_while_nothing_can_be_trained() -> None:
    run = Script()
    run.start()
    assert run.end(*range(31)) == []
    run.end(31)
    assert run.tell(GroupReady(GroupId(3), 1)) == [ToTraining(CellId(0))], "one micro-step occupies one cell"
    assert run.tell(GroupReady(GroupId(1), 2)) == [ToTraining(CellId(1)), ToTraining(CellId(2))]


def test_late_groups_join_the_batch_under_way_and_late_cells_join_its_training() -> None:
    run = Script()
    run.start()
    for group in (2, 0, 1):
        run.end_group(group)
    run.trains(0)
    assert run.state.trainers == (0,) and run.roles()[1] is CellRole.JOINING
    assert run.tell(MicroSteps(0, 1)) == [], "the window stays open: a group is still under way"
    run.tell(MicroSteps(0, 0))
    run.end_group(3)
    assert run.state.open_batch is not None and run.state.open_batch.groups == (2, 0, 1, 3)
    run.trains(1)
    assert run.state.trainers == (0, 1)
    assert run.tell(MicroSteps(0, 2)) == [CloseJoinWindow()]
    assert run.tell(MicroSteps(0, 0)) == [CloseBatch()]


def test_returned_claims_reopen_the_window_and_even_a_closed_batch() -> None:
    run = Script()
    run.start()
    for group in range(4):
        run.end_group(group)
    run.trains(0, 1, 2)
    assert run.tell(MicroSteps(0, 3)) == [CloseJoinWindow()]
    run.tell(MicroSteps(2, 1))
    assert run.state.open_batch is not None and run.state.open_batch.window_open
    assert run.work_off() == [CloseJoinWindow(), CloseBatch()]
    run.tell(MicroSteps(5, 0))
    assert run.state.open_batch is not None and not run.state.open_batch.closed
    assert run.work_off() == [CloseJoinWindow(), CloseBatch()]
    assert run.step() == [Publish(Version(1))]


def test_a_report_overtaken_by_a_growing_batch_is_dropped() -> None:
    run = Script(batch_groups=2)
    run.start()
    run.end_group(0)
    run.end_group(1)
    run.trains(0, 1, 2)
    assert run.tell(MicroSteps(0, 0, batch=0, groups=1)) == [], "group 1 is not covered"
    assert run.tell(MicroSteps(0, 0, batch=7, groups=2)) == [], "another batch"
    assert run.tell(MicroSteps(0, 0, batch=0, groups=2)) == [CloseJoinWindow(), CloseBatch()]


def test_a_burst_ends_with_its_publication_then_dispatch_then_the_return_of_its_cells() -> None:
    run = Script()
    run.first_step()
    assert run.said == (Publish(Version(1)),)
    kinds = [type(decision) for decision in run.publish()]
    assert kinds == [EndBurst, Dispatch, ToRollout, ToRollout, ToRollout]
    assert run.state.burst.index == 1 and run.state.published == 1
    assert run.tell(CellReady(CellId(2), Role.ROLLOUT)) == [
        Launch(tuple(ExecutionId(i) for i in range(32, 43)))
    ]


def test_the_core_stays_when_the_next_batch_has_work_and_the_satellites_hold_the_waterlevel() -> None:
    run = Script(batch_groups=1, groups_ahead=1, capacities=(11, 11, 11))
    run.start()
    run.end_group(0)
    run.trains(0)
    run.end_group(1)
    run.work_off()
    run.step()
    run.publish()
    assert run.state.cells[0].role is CellRole.TRAINING and run.state.waterlevel == 8
    assert run.state.open_batch is not None and run.state.open_batch.groups == (1,)


def test_a_cell_whose_switch_outlasts_the_burst_returns_as_soon_as_it_has_arrived() -> None:
    run = Script()
    run.start()
    for group in range(4):
        run.end_group(group)
    run.trains(0, 1)
    run.work_off()
    run.step()
    run.publish()
    assert run.roles() == [CellRole.RETURNING, CellRole.RETURNING, CellRole.RECALLED]
    assert run.trains(2) == [ToRollout(CellId(2))]


def test_a_burst_of_two_steps_publishes_once() -> None:
    run = Script(batch_groups=2, steps_per_burst=2, steps=4)
    run.start()
    for group in range(4):
        run.end_group(group)
    run.trains(0, 1, 2)
    assert run.work_off() == [CloseJoinWindow(), CloseBatch()]
    assert run.step() == [] and run.state.version == 1 and run.state.published == 0
    assert run.state.open_batch is not None and run.state.open_batch.groups == (2, 3)
    run.work_off()
    assert run.step() == [Publish(Version(2))]


def test_ready_groups_of_the_next_batch_are_work_for_a_further_cell() -> None:
    run = Script(batch_groups=2, steps_per_burst=2, steps=4)
    run.start()
    run.end_group(0)
    run.end_group(1)
    run.trains(0)
    run.tell(MicroSteps(0, 8))
    run.end(*range(16, 29))
    assert run.roles()[1] is CellRole.ROLLOUT, "w = 3, but every micro-step is claimed"
    run.end(29, 30, 31)
    assert run.tell(GroupReady(GroupId(2), 1)) == [ToTraining(CellId(1))]


def test_after_a_void_burst_every_training_cell_returns() -> None:
    run = Script(batch_groups=1, groups_ahead=1, executions_per_group=2)
    run.start()
    run.end_group(0)
    run.end_group(1)
    run.trains(0, 1, 2)
    run.work_off()
    kinds = [type(decision) for decision in run.tell(BatchDone(stepped=False))]
    assert kinds[:5] == [EndBurst, Dispatch, ToRollout, ToRollout, ToRollout]


def test_equal_rewards_use_a_slot_without_a_step_and_a_burst_of_them_is_void() -> None:
    run = Script()
    run.start()
    for group in range(3):
        assert run.end_group(group, micro_steps=0) == []
    assert run.end_group(3, micro_steps=0) == [CloseJoinWindow(), CloseBatch()]
    kinds = [type(decision) for decision in run.tell(BatchDone(stepped=False))]
    assert kinds == [EndBurst, Dispatch, Launch]
    assert run.state.version == 0 and run.state.void_bursts == 1


def test_too_many_void_bursts_stop_the_run_and_name_their_reasons() -> None:
    run = Script(batch_groups=1, max_void_bursts=2)
    run.start()
    run.end_group(0, micro_steps=0)
    run.tell(BatchDone(stepped=False))
    run.end(*range(8, 16))
    said = run.tell(GroupDead(GroupId(1), "no valid outcome"))
    assert said[-1] == Stop(
        "2 bursts in a row without a step: group 0: equal rewards or no accepted target; group 1: no valid outcome"
    )


def test_a_dead_group_uses_no_slot_and_the_batch_closes_short_when_none_is_left() -> None:
    run = Script()
    run.start()
    for group in range(3):
        run.end_group(group)
    run.end(*range(24, 32))
    assert run.tell(GroupDead(GroupId(3), "infrastructure"))[0] == WriteOff(GroupId(3), "infrastructure")
    run.trains(0, 1, 2)
    assert run.work_off() == [CloseJoinWindow(), CloseBatch()]
    assert run.state.open_batch is not None and run.state.open_batch.groups == (0, 1, 2)


def test_a_group_ahead_takes_the_slot_of_a_dead_one_and_the_next_dispatch_replaces_it() -> None:
    run = Script(batch_groups=2, groups_ahead=1)
    run.start()
    run.end(*range(8))
    run.tell(GroupDead(GroupId(0), "infrastructure"))
    run.end_group(1)
    run.end_group(2)
    assert run.state.open_batch is not None and run.state.open_batch.groups == (1, 2)
    run.trains(0, 1, 2)
    run.work_off()
    run.step()
    run.publish()
    (dispatch,) = run.heard(Dispatch)
    assert isinstance(dispatch, Dispatch) and len(dispatch.groups) == 3


def test_the_slot_of_a_group_at_its_staleness_limit_is_kept_for_it() -> None:
    run = Script(batch_groups=1, groups_ahead=1, max_staleness=1, steps=5)
    run.start()
    run.end_group(1)
    run.trains(0)
    run.work_off()
    run.step()
    run.publish()
    run.end_group(2)
    assert run.state.open_batch is not None and run.state.open_batch.groups == (), "group 0 is due"
    run.end_group(0)
    assert run.state.open_batch is not None and run.state.open_batch.groups == (0,)


def test_a_group_beyond_its_staleness_limit_is_written_off() -> None:
    run = Script(batch_groups=1, groups_ahead=1, max_staleness=0)
    run.start()
    run.end_group(0)
    run.trains(0)
    run.work_off()
    said = run.step()
    assert Withdraw(tuple(ExecutionId(i) for i in range(8, 16))) in said
    assert WriteOff(GroupId(1), "1 steps old, schedule.max_staleness=0") in said
    assert run.end(*range(8, 16)) == [] and run.state.waterlevel == 0


def test_surplus_is_withdrawn_at_n_valid_outcomes_and_counted_once() -> None:
    run = Script(batch_groups=1, executions_per_group=2, oversample=2, capacities=(3,))
    run.start()
    assert run.state.waterlevel == 4 and run.state.launched == 3
    run.end(0, 1)
    run.tell(Outcome(ExecutionId(0), valid=True), Outcome(ExecutionId(1), valid=True))
    assert run.said == (Withdraw((ExecutionId(2), ExecutionId(3))),)
    run.end(2, 2, 3, 3)
    assert run.state.dispatched == run.state.launched == run.state.terminated == 4


def test_a_withdrawn_queued_execution_never_starts_and_raises_p_and_f_together() -> None:
    run = Script(batch_groups=1, executions_per_group=2, oversample=2, capacities=(2,))
    run.start()
    run.tell(CellUnroutable(CellId(0), "engine restart"))
    run.end(0, 1)
    run.tell(Outcome(ExecutionId(0), valid=True), Outcome(ExecutionId(1), valid=True))
    assert run.said == (Withdraw((ExecutionId(2), ExecutionId(3))),)
    assert (run.state.dispatched, run.state.launched, run.state.terminated) == (4, 2, 2)
    assert run.tell(CellRoutable(CellId(0))) == []
    run.end(2)
    assert (run.state.dispatched, run.state.launched, run.state.terminated) == (4, 3, 3)


def test_the_last_burst_dispatches_and_steps_only_what_is_left() -> None:
    run = Script(batch_groups=1, steps_per_burst=3, groups_ahead=2, steps=4)
    run.start()
    assert len(run.state.groups) == 4
    for group in range(3):
        run.end_group(group)
    run.trains(0, 1)
    for _ in range(3):
        run.work_off()
        run.step()
    run.publish()
    assert run.state.burst.planned == 1 and not run.heard(Dispatch)


def test_the_run_ends_after_the_last_publication() -> None:
    run = Script(steps=1)
    run.first_step()
    assert run.publish() == [EndBurst(Version(1)), Stop("")]
    assert run.state.finished and run.tell(Published(Version(1))) == []


def test_evaluations_before_the_first_dispatch_and_after_the_last_publication_run_alone() -> None:
    run = Script(steps=1, evaluate_first=True, evaluate_last=True)
    assert run.start() == []
    (evaluation,) = run.tell(EvaluationDue(Version(0), 40))
    assert isinstance(evaluation, LaunchEvaluation) and len(evaluation.ids) == 33
    assert run.state.evaluating == 33 and run.state.waterlevel == 0
    assert not [said for said in run.end(*range(39)) if isinstance(said, Dispatch)]
    kinds = [type(decision) for decision in run.end(39)]
    assert kinds == [Dispatch, Launch]
    for group in range(4):
        run.end_group(group)
    run.trains(0, 1, 2)
    run.work_off()
    run.step()
    assert [type(decision) for decision in run.publish()] == [EndBurst, ToRollout, ToRollout, ToRollout]
    assert run.state.phase is Phase.ENDING
    run.tell(EvaluationDue(Version(1), 2))
    assert run.tell(CellReady(CellId(1), Role.ROLLOUT)) == [
        LaunchEvaluation((ExecutionId(72), ExecutionId(73)), Version(1))
    ]
    assert run.end(72, 73) == [Stop("")]


def test_a_periodic_evaluation_waits_for_spare_capacity_and_holds_it() -> None:
    run = Script(capacities=(11, 11, 11))
    run.start()
    assert run.tell(EvaluationDue(Version(0), 3)) == [LaunchEvaluation((ExecutionId(32),), Version(0))]
    run.end_group(0)
    assert run.state.evaluating == 3
    assert run.end(8, 9, 10, 11) == [], "w + e = 20 + 3 > 22"
    assert run.end(34) == [ToTraining(CellId(0))]
    assert run.state.terminated == 12, "a held-out execution never counts in f"
