"""Simulated faults in worlds that are small enough to be computed by hand."""

from __future__ import annotations

import pytest

from gyre_hpc.schedule.settings import PolicyName
from gyre_hpc.simulate.simulator import Stuck, simulate
from gyre_hpc.simulate.world import (
    CellLoss,
    EvaluatorOutage,
    Preemption,
    SwitchCosts,
    TrainingModel,
    wall_time,
)
from tests.simulate.tiny import Given, moments, plan, world


def test_work_of_a_lost_satellite_is_done_again() -> None:
    """At 45 the core has done 5 and the satellite 2 of the second group's 10: the core goes on with 5 alone."""
    outcome = simulate(plan(2), world(2, CellLoss(45.0, cell=1)), Given())
    assert outcome.seconds == 50.0 + 1.0 + 4.0


def test_micro_steps_of_a_lost_satellite_are_claimed_again() -> None:
    """Two micro-steps of 5 s: cell 1 is lost at 45 with the one it took at 43; the core does it from 45 to 50."""
    model = TrainingModel(micro_step_s=5.0, step_s=1.0)
    outcome = simulate(plan(2), world(2, CellLoss(45.0, cell=1), training=model), Given())
    assert outcome.seconds == 50.0 + 1.0 + 4.0


def test_claims_that_return_re_open_a_closed_batch() -> None:
    """Closed at 48, to be committed at 49; at 48.5 the satellite dies and its micro-step is done again until 53.5."""
    model = TrainingModel(micro_step_s=5.0, step_s=1.0)
    outcome = simulate(plan(2), world(2, CellLoss(48.5, cell=1), training=model), Given())
    assert outcome.seconds == 53.5 + 1.0 + 4.0


def test_a_batch_that_closes_again_is_committed_from_then_on() -> None:
    """A step takes 10 s: closed at 48 and, after the satellite's loss at 48.5, once more at 53.5."""
    model = TrainingModel(micro_step_s=5.0, step_s=10.0)
    outcome = simulate(plan(2), world(2, CellLoss(48.5, cell=1), training=model), Given())
    assert outcome.seconds == 53.5 + 10.0 + 4.0


def test_a_lost_core_is_restored_on_another_cell() -> None:
    """Lost at 25 while it trains; cell 1 is restored at 35, joins at 38; cell 0 is back at 30 and joins from 43 on."""
    outcome = simulate(plan(2), world(2, CellLoss(25.0, cell=0, back_after_s=5.0, restore_s=10.0)), Given())
    assert outcome.seconds == pytest.approx(50.5 + 1.0 + 4.0)


def test_steps_above_the_checkpoint_are_undone() -> None:
    """Version 1 is taken at 34 and lost at 36; restored at 46, both groups are trained from 49 on."""
    twice = plan(2, batch_groups=1, steps_per_burst=2, steps=2)
    outcome = simulate(twice, world(2, CellLoss(36.0, cell=0, restore_s=10.0)), Given())
    assert [(step.version, step.at_s) for step in outcome.steps] == [(2, 60.0), (3, 71.0)]
    assert outcome.published == {3: 75.0}


def test_a_warned_job_keeps_its_newest_version() -> None:
    """As above, but the whole job ends at 36 and is back at 46; the step is on disk only if there was a warning."""
    twice = plan(2, batch_groups=1, steps_per_burst=2, steps=2)
    warned = simulate(twice, world(2, Preemption(36.0, 10.0, restore_s=0.0)), Given())
    killed = simulate(twice, world(2, Preemption(36.0, 10.0, restore_s=0.0, warned=False)), Given())
    assert [step.version for step in warned.steps] == [1, 2]
    assert [step.version for step in killed.steps] == [2, 3]


def test_training_interrupted_by_the_end_of_the_job_begins_again() -> None:
    """Ends at 50, back at 150, restored at 160, in training at 163."""
    outcome = simulate(plan(1), world(1, Preemption(50.0, back_after_s=100.0, restore_s=10.0)), Given())
    assert outcome.seconds == 183.0 + 1.0 + 4.0


def test_a_publication_cut_by_the_end_of_the_job_never_happened() -> None:
    """Ends at 66, two seconds before version 1 is served; back at 166, restored at 176."""
    killed = Preemption(66.0, back_after_s=100.0, restore_s=10.0, warned=False)
    outcome = simulate(plan(1), world(1, killed), Given())
    assert outcome.published == {2: 179.0 + 20.0 + 1.0 + 4.0}


def test_a_core_restored_at_the_moment_of_another_fault_is_restored_once() -> None:
    """The job is back at once, its core restored at once, and ends again at that very moment."""
    again = Preemption(15.0, back_after_s=0.0, restore_s=0.0)
    twice = simulate(plan(2), world(2, again, again), Given())
    assert twice.seconds == simulate(plan(2), world(2, again), Given()).seconds


def test_launches_cut_by_the_end_of_the_job_begin_again() -> None:
    """Launched at 0 for 5 s; the job ends at 3 and is back at 13: they start at 18 and have ended at 22."""
    quick = Given(((1.0, 2.0), (3.0, 4.0)))
    faulty = world(1, Preemption(3.0, back_after_s=10.0, restore_s=0.0), launch_s=5.0)
    assert simulate(plan(1), faulty, quick).seconds == 22.0 + 3.0 + 20.0 + 1.0 + 4.0


def test_a_replacement_under_way_comes_back_with_the_next_job_only() -> None:
    end = Preemption(15.0, back_after_s=85.0)
    replaced = world(2, CellLoss(10.0, cell=1, back_after_s=20.0), end)
    assert simulate(plan(2), replaced, Given()) == simulate(
        plan(2), world(2, CellLoss(10.0, cell=1), end), Given()
    )


def test_executions_interrupted_by_the_end_of_the_job_begin_again() -> None:
    """At 15 one has ended; the others begin again at 115, the last ends at 155."""
    outcome = simulate(plan(1), world(1, Preemption(15.0, back_after_s=100.0, restore_s=10.0)), Given())
    assert outcome.seconds == 155.0 + 3.0 + 20.0 + 1.0 + 4.0


def test_the_time_limit_does_not_run_while_the_job_is_away() -> None:
    limited = world(1, Preemption(15.0, back_after_s=100.0, restore_s=10.0), limit_s=45.0)
    assert simulate(plan(1), limited, Given()).seconds == 155.0 + 3.0 + 20.0 + 1.0 + 4.0


def test_a_switch_under_way_when_its_cell_dies_never_ends() -> None:
    """Cell 1 leaves at 40 for 30 s and dies at 41; its replacement serves at 43 and joins on its own account at 73."""
    slow = SwitchCosts({"load": 30.0}, {"load": 2.0})
    faulty = world(2, CellLoss(41.0, cell=1, back_after_s=2.0), switch=slow)
    outcome = simulate(plan(2), faulty, Given(), record=True)
    assert moments(outcome, "training") == [50.0, 73.0] and outcome.seconds == 75.0


def test_executions_wait_for_an_evaluator_that_is_away() -> None:
    """Away from 35 to 65: those that end at 40 are scored then; group 0 is trained meanwhile."""
    outcome = simulate(plan(1), world(1, EvaluatorOutage(35.0, 30.0), evaluate_s=1.0), Given())
    assert outcome.seconds == 65.0 + 10.0 + 1.0 + 4.0


def test_wall_time_ends_every_job_but_the_last() -> None:
    faults = wall_time(500.0, back_after_s=90.0, jobs=3)
    assert [fault.at_s for fault in faults] == [500.0, 1090.0]
    assert wall_time(500.0, back_after_s=90.0, jobs=1) == ()


def test_a_run_goes_on_over_several_jobs() -> None:
    long = plan(1, steps=6)
    faults = wall_time(150.0, back_after_s=1000.0, jobs=8, restore_s=5.0)
    outcome = simulate(long, world(1, *faults), Given())
    assert len(outcome.steps) == 6 and outcome.device_time["down", "down"] > 1000.0


def test_without_any_cell_a_world_is_stuck() -> None:
    with pytest.raises(Stuck, match="C_R=0"):
        simulate(plan(1), world(1, CellLoss(15.0, cell=0)), Given())


def test_losing_a_dead_cell_changes_nothing() -> None:
    once = world(2, CellLoss(5.0, cell=1))
    twice = world(2, CellLoss(5.0, cell=1), CellLoss(6.0, cell=1, back_after_s=1.0))
    assert simulate(plan(2), once, Given()) == simulate(plan(2), twice, Given())


def test_a_fixed_training_cell_that_dies_is_followed_by_another() -> None:
    outcome = simulate(plan(2, PolicyName.ASYNC), world(2, CellLoss(25.0, cell=0, back_after_s=5.0)), Given())
    assert len(outcome.steps) == 1
