"""What a point of a sweep is, and how its run is named."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.sweep.points import NAME_LENGTH, Point, points_of, run_name

GIVEN = ["experiment=quickstart", "schedule=gyre,async", "objective.j_max=1,5", "cluster.job.time=01:00:00"]
ONE = ["experiment=quickstart", "schedule=gyre", "objective.j_max=5", r"cluster.job.time=01\:00\:00"]


def test_what_stands_on_the_command_line_was_not_swept_over() -> None:
    (point,) = points_of([ONE], GIVEN)
    assert point.label == "schedule=gyre objective.j_max=5"
    assert run_name("quickstart", point) == "quickstart-schedule_gyre-j_max_5"
    listed = Point((), ("cluster.job.setup=['exit 3']",))
    assert run_name("quickstart", listed) == "quickstart-setup_exit_3"


def test_another_job_request_makes_no_other_point_unless_it_is_swept_over() -> None:
    (point,) = points_of([ONE], GIVEN)
    longer = [word.replace("01", "02") for word in ONE]
    assert points_of([longer], [*GIVEN[:3], "cluster.job.time=02:00:00"])[0].identity == point.identity
    assert points_of([longer], GIVEN)[0].identity != point.identity
    assert points_of([[*ONE[:2], "objective.j_max=1", ONE[3]]], GIVEN)[0].identity != point.identity


def test_words_are_compared_as_hydra_writes_them() -> None:
    given = ["cluster.job.sbatch=[--hold, 'a b']", "++cluster.job.env.X='c d'", "seed=1,2"]
    words = ["cluster.job.sbatch=[--hold,'a b']", "++cluster.job.env.X='c d'", "seed=2"]
    assert points_of([words], given)[0].swept == ("seed=2",)


def test_a_sweep_over_nothing_is_one_point_named_by_its_words() -> None:
    assert points_of([["seed=3"]], ["seed=3"])[0].label == "seed=3"
    assert points_of([[]], [])[0].label == "(no overrides)"


@given(st.lists(st.text(max_size=60), max_size=6))
def test_a_name_is_safe_in_a_path_in_slurm_and_in_hydra(words: list[str]) -> None:
    name = run_name("run", Point(tuple(words), tuple(words)))
    assert re.fullmatch(r"[A-Za-z0-9._-]+", name) and len(name) <= NAME_LENGTH
