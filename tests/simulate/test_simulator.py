"""Simulated times of worlds that are small enough to be computed by hand."""

from __future__ import annotations

import pytest

from gyre_hpc.errors import ConfigError
from gyre_hpc.schedule.settings import PolicyName
from gyre_hpc.simulate.simulator import Stuck, simulate
from gyre_hpc.simulate.world import EngineModel, Place, TrainingModel, World
from tests.simulate.tiny import Given, moments, plan, waters, world

GYRE, COLOCATE, ASYNC = PolicyName.GYRE, PolicyName.COLOCATE, PolicyName.ASYNC


def test_one_cell_rolls_out_then_trains() -> None:
    """Rollout ends at 40, switch 43, 20 node-seconds 63, step 64, published 68."""
    outcome = simulate(plan(1), world(1), Given())
    assert outcome.published == {1: 68.0} and outcome.seconds == 68.0
    assert [step.at_s for step in outcome.steps] == [64.0]
    assert outcome.switches == 1


def test_a_cell_joins_as_soon_as_the_waterlevel_allows_it() -> None:
    """Cell 0 leaves at 20 and trains group 0 from 23 to 33; group 1 is ready at 40, cell 1 helps from 43 on: 46.5."""
    outcome = simulate(plan(2), world(2), Given())
    assert [step.at_s for step in outcome.steps] == [47.5]
    assert outcome.seconds == 51.5


def test_the_next_burst_starts_with_the_publication() -> None:
    """Executions are launched when the cells are back, 2 s later."""
    outcome = simulate(plan(2, steps=2), world(2), Given())
    assert outcome.published == {1: 51.5, 2: 51.5 + 2.0 + 51.5}
    assert outcome.seconds_per_step() == pytest.approx(52.5)
    assert outcome.seconds_per_step(1) == pytest.approx(53.5)


def test_micro_steps_are_claimed_whole() -> None:
    """Group 1 in two micro-steps of 5 s: cell 0 takes one at 40, cell 1 the other at 43."""
    model = TrainingModel(micro_step_s=5.0, step_s=1.0)
    assert simulate(plan(2), world(2, training=model), Given()).seconds == 48.0 + 1.0 + 4.0


def test_a_known_number_of_micro_steps_counts() -> None:
    """Group 1 in one micro-step: cell 0 alone does it, from 40 to 50."""
    model = TrainingModel(micro_step_s=5.0, step_s=1.0)
    outcome = simulate(plan(2), world(2, training=model), Given(details={"micro_steps": 1}))
    assert outcome.seconds == 50.0 + 1.0 + 4.0


def test_no_cell_joins_for_micro_steps_that_are_claimed() -> None:
    """One micro-step a group. Cell 1 is sent as cell 0 arrives (23), before it has claimed; cell 2 not as cell 1 arrives."""
    model = TrainingModel(micro_step_s=5.0, step_s=1.0)
    roomy = world(4, training=model, cells=(Place(1.0, 4),) * 4)
    one = Given(details={"micro_steps": 1})
    outcome = simulate(plan(4, capacities=(4,) * 4), roomy, one, record=True)
    assert moments(outcome, "joining") == [20.0, 23.0, 40.0]


def test_a_fluid_fills_its_pipeline_once_per_batch() -> None:
    model = TrainingModel(step_s=1.0, fill_s=6.0)
    assert simulate(plan(1), world(1, training=model), Given()).seconds == 74.0


def test_satellites_wait_for_the_weights_of_the_step_before() -> None:
    """Two steps of one group: both cells train from 46.5 - 1 on, the second batch without cell 1 for 2 s."""
    slow = TrainingModel(step_s=1.0, snapshot_s=2.0)
    fast = TrainingModel(step_s=1.0)
    twice = plan(2, COLOCATE, batch_groups=1, steps_per_burst=2, steps=2)
    assert simulate(twice, world(2, training=fast), Given()).steps[1].at_s == 43 + 5 + 1 + 5 + 1
    assert simulate(twice, world(2, training=slow), Given()).steps[1].at_s == 43 + 5 + 1 + (2 + 4) + 1


def test_colocate_moves_all_cells_at_once() -> None:
    """Both leave at 40 and share 20 node-seconds from 43 on."""
    assert simulate(plan(2, COLOCATE), world(2), Given()).seconds == 53.0 + 1.0 + 4.0


def test_async_has_one_cell_for_each_role() -> None:
    """Two at a time on cell 1: they end at 10, 20, 40 and 60; group 1 trains from 60 to 70."""
    outcome = simulate(plan(2, ASYNC), world(2), Given())
    assert outcome.seconds == 70.0 + 1.0 + 4.0
    assert outcome.switches == 1


def test_executions_slow_each_other_down_beyond_saturation() -> None:
    """Room for two at full speed: four end at 20, 35, 45 and 55."""
    loaded = world(1, engine=EngineModel(saturation=0.5))
    assert simulate(plan(1), loaded, Given()).seconds == pytest.approx(55.0 + 3.0 + 20.0 + 1.0 + 4.0)


def test_tool_time_does_not_slow_down() -> None:
    """Half of the time is tools: pace 1/1.5 for four, 1/1.25 for three."""
    loaded = world(1, engine=EngineModel(saturation=0.5, tool_share=0.5))
    end = 15.0 + 12.5 + 10.0 + 10.0
    assert simulate(plan(1), loaded, Given()).seconds == pytest.approx(end + 3.0 + 20.0 + 1.0 + 4.0)


def test_the_time_limit_is_wall_time() -> None:
    """At half speed only the first has ended by 25."""
    loaded = world(1, engine=EngineModel(saturation=0.5), limit_s=25.0)
    assert simulate(plan(1), loaded, Given()).seconds == pytest.approx(25.0 + 3.0 + 20.0 + 1.0 + 4.0)


def test_a_leaving_cell_lets_its_executions_repeat_their_prefill() -> None:
    """Cell 0 leaves at 20 with one of the two that run, the older: it ends at 36 instead of 30."""
    slow = world(2, engine=EngineModel(prefill_s=6.0))
    outcome = simulate(plan(2), slow, Given(), record=True)
    assert min(line.t for line in waters(outcome) if line.waterlevel == 1) == 36.0


def test_launches_and_scores_take_their_time() -> None:
    """Start at 2, end at 42, scored at 57; group 0 trains from 45 to 55 meanwhile."""
    slow = world(1, launch_s=2.0, evaluate_s=15.0)
    assert simulate(plan(1), slow, Given()).seconds == 57.0 + 10.0 + 1.0 + 4.0


def test_a_group_may_know_when_it_is_scored() -> None:
    known = Given(details={"scored_s": 15.0})
    assert simulate(plan(1), world(1), known).seconds == 40.0 + 15.0 + 10.0 + 1.0 + 4.0


def test_cells_that_start_late_serve_late() -> None:
    late = world(1, cells=(Place(1.0, 4, start_s=11.0),))
    assert simulate(plan(1), late, Given()).seconds == 68.0 + 11.0


def test_evaluations_run_alone_at_both_ends() -> None:
    """7 s before the first dispatch; after the publication the cell returns (2 s) and serves them again."""
    both = plan(1, evaluate_first=True, evaluate_last=True)
    outcome = simulate(both, world(1, heldout=2), Given())
    assert outcome.published == {1: 7.0 + 68.0}
    assert outcome.seconds == 7.0 + 68.0 + 2.0 + 7.0


def test_evaluations_in_between_wait_for_spare_capacity() -> None:
    """Due with version 1, when four executions wait for four places: they start as those end, at 10 and 20."""
    periodic = world(1, heldout=2, evaluate_every=1)
    outcome = simulate(plan(1, steps=2), periodic, Given(), record=True)
    begin = 68.0 + 2.0
    running = [line.t for line in waters(outcome) if line.evaluating]
    assert min(running) == begin + 10.0 and max(running) < begin + 27.0 + 1e-9


def test_a_group_with_equal_rewards_uses_its_slot_without_a_step() -> None:
    outcome = simulate(plan(1, max_void_bursts=2), world(1), Given(cost=0.0))
    assert outcome.steps == [] and "2 bursts in a row without a step" in outcome.reason


def test_invalid_executions_are_not_trained() -> None:
    """Three members, one of them invalid: 10 node-seconds a group instead of 15."""
    three = Given(((10.0, 20.0, 40.0), (30.0, 40.0, 5.0)), details={"valid": (True, False, True)})
    room = world(1, cells=(Place(1.0, 6),))
    outcome = simulate(plan(1, executions_per_group=3, capacities=(6,)), room, three)
    assert outcome.seconds == 68.0


def test_surplus_is_cancelled() -> None:
    """N=2 of 3: the third of each group is withdrawn when two have ended, at 20 and 40; w is 0 at 40."""
    three = Given(((10.0, 20.0, 90.0), (30.0, 40.0, 90.0)))
    outcome = simulate(plan(1, oversample=1, capacities=(6,)), world(1, cells=(Place(1.0, 6),)), three)
    assert outcome.seconds == 68.0


def test_a_world_that_can_never_go_on_is_named_stuck() -> None:
    with pytest.raises(Stuck, match="stuck at 0 s: w=4"):
        simulate(plan(1), world(1, cells=(Place(1.0, 4, start_s=float("inf")),)), Given())


def test_a_world_has_cells_with_nodes() -> None:
    with pytest.raises(ConfigError, match="needs nodes"):
        World(cells=())


def test_a_run_may_end_at_a_version() -> None:
    outcome = simulate(plan(1, steps=5), world(1), Given(), until=2)
    assert max(outcome.published) == 2 and outcome.seconds == 68.0 + 70.0
