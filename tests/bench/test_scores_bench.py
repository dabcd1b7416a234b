"""How the scores of policies are compared: group by group, so that hard queries cancel."""

from __future__ import annotations

import random

import pytest

from gyre_hpc.bench import scores
from gyre_hpc.composition import compose
from gyre_hpc.report import metrics as m


def ended(group: int | None, score: float | None) -> m.Ended:
    return m.Ended(1.0, 0, group, "completed", score, 1.0, 4, 2, 0, 9, 0, 9, 0.0)


def test_a_group_has_the_mean_of_its_valid_scores_and_held_out_executions_have_none() -> None:
    lines = [ended(0, 1.0), ended(0, 0.0), ended(0, None), ended(1, 0.25), ended(None, 1.0)]
    assert scores.group_scores(lines) == {0: 0.5, 1: 0.25}


def world(shift: float, seed: int) -> scores.Scores:
    """Queries differ by far more than executions do."""
    noise = random.Random(seed)
    return {(1, group): random.Random(group).random() + shift + noise.gauss(0, 0.02) for group in range(50)}


def test_policies_that_learn_the_same_are_close_and_a_worse_one_is_found() -> None:
    found = scores.figures({"gyre": world(0.0, 1), "colocate": world(0.0, 2), "async": world(-0.03, 3)})
    assert found["colocate_distance"].value < 2.5
    assert found["async_distance"].value > 4
    assert found["async_distance"].aim == 2.0
    assert found["score_gyre"].value - found["score_async"].value == pytest.approx(0.03, abs=0.01)


def test_a_policy_that_learns_otherwise_fails_the_bench_and_chance_does_not() -> None:
    same = scores.figures({"gyre": world(0.0, 1), "colocate": world(0.0, 2)})
    assert scores.agreeing(same) == same
    with pytest.raises(scores.PoliciesDiffer, match=r"async_distance \d.*async - gyre = -0\.03"):
        scores.agreeing(scores.figures({"gyre": world(0.0, 1), "async": world(-0.03, 3)}))


def test_without_two_groups_in_common_there_is_no_standard_error() -> None:
    with pytest.raises(ValueError, match="1 groups in common"):
        scores.difference({(1, 0): 1.0, (1, 1): 1.0}, {(1, 1): 0.5})


def test_all_policies_are_compared_at_the_same_mean_staleness_and_the_same_work() -> None:
    runs = [compose([*scores.RUN, *design]) for design in scores.POLICIES.values()]
    assert {run.schedule.extra_dispatch + (run.schedule.steps_per_burst - 1) / 2 for run in runs} == {1.0}
    for run in runs:
        assert (run.engine, run.trainer, run.objective, run.tasks) == (
            runs[0].engine,
            runs[0].trainer,
            runs[0].objective,
            runs[0].tasks,
        )
    assert scores.STEPS % 3 == 0, "whole bursts"
