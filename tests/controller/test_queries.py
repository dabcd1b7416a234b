"""Which task an execution attempts, its key and its seed; and the score of an evaluation point."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.config import TasksConfig
from gyre_hpc.controller import freeze
from gyre_hpc.controller.executions import queries
from gyre_hpc.controller.journal.evaluations import EvaluationPoint, Evaluations
from gyre_hpc.records import Assessment, ExecutionId, GroupId, Version

TASKS = TasksConfig()


def test_every_group_of_every_seed_meets_a_task_of_its_own() -> None:
    met = [queries.training_query(TASKS, seed, GroupId(group)) for seed in range(4) for group in range(500)]
    assert len(set(met)) == len(met)


def test_an_evaluation_covers_all_held_out_tasks_equally_often() -> None:
    met = [queries.heldout_query(TASKS, position) for position in range(queries.evaluation_size(TASKS))]
    assert len(met) == 80 and len(set(met)) == 40
    assert {met.count(query) for query in met} == {TASKS.evaluation_repeats}


def test_a_key_is_unguessable_and_belongs_to_one_attempt() -> None:
    keys = {
        queries.execution_key(secret, ExecutionId(id), attempt)
        for secret in (b"one", b"two")
        for id in range(20)
        for attempt in (1, 2)
    }
    assert len(keys) == 80
    assert all(len(key) == 32 and set(key) <= set("0123456789abcdef") for key in keys)


@given(seed=st.integers(0, 10**6), execution=st.integers(0, 10**7))
def test_a_harness_seed_fits_32_bits_and_differs_from_its_neighbour(seed: int, execution: int) -> None:
    found = queries.execution_seed(seed, ExecutionId(execution))
    assert 0 <= found < 2**31
    assert found != queries.execution_seed(seed, ExecutionId(execution + 1))


@given(st.lists(st.floats(0, 1), min_size=2, max_size=40))
def test_standard_error_is_the_sample_deviation_over_the_root_of_n(scores: list[float]) -> None:
    point = EvaluationPoint(Version(0), len(scores), scores={ExecutionId(i): s for i, s in enumerate(scores)})
    assert point.mean == pytest.approx(statistics.fmean(scores))
    assert point.standard_error == pytest.approx(statistics.stdev(scores) / math.sqrt(len(scores)), abs=1e-9)


def test_no_score_is_none_and_one_score_has_no_error() -> None:
    empty = EvaluationPoint(Version(0), 2, invalid=2)
    assert (empty.mean, empty.standard_error, empty.complete) == (None, None, True)
    one = EvaluationPoint(Version(0), 2, scores={ExecutionId(1): 0.5})
    assert (one.mean, one.standard_error, one.complete) == (0.5, None, False)


def test_an_invalid_assessment_is_no_zero() -> None:
    evaluations = Evaluations()
    evaluations.due(Version(0), 3)
    for id in range(3):
        assert evaluations.launched(ExecutionId(id), Version(0)) == id
    evaluations.outcome(ExecutionId(0), Assessment(1.0, True, "passed"))
    evaluations.outcome(ExecutionId(1), Assessment(None, False, "evaluator died"))
    point = evaluations.outcome(ExecutionId(2), None)
    assert (point.mean, point.invalid, point.complete) == (1.0, 2, True)


def test_two_points_of_one_version_fill_one_after_the_other() -> None:
    evaluations = Evaluations()
    first, second = evaluations.due(Version(0), 2), evaluations.due(Version(0), 2)
    positions = [evaluations.launched(ExecutionId(id), Version(0)) for id in range(4)]
    assert positions == [0, 1, 0, 1]
    assert (first.members, second.members) == ([0, 1], [2, 3])


def test_the_code_of_a_run_is_frozen_with_it(tmp_path: Path) -> None:
    freeze.freeze_code(tmp_path)
    frozen = msgspec.json.decode((tmp_path / "frozen.json").read_bytes(), type=freeze.Frozen)
    assert frozen.version and frozen.packages["torch"]
    assert len(frozen.commit) in (0, 40)
    assert (tmp_path / "package" / "gyre_hpc" / "records.py").is_file()
    assert not list((tmp_path / "package").rglob("*.safetensors"))


def test_a_checkout_around_the_environment_does_not_pass_for_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"ls-files": "", "rev-parse": "0" * 40, "status": " M theirs.py"}
    monkeypatch.setattr(freeze, "_git", lambda *arguments: said[arguments[0]])
    freeze.freeze_code(tmp_path)
    frozen = msgspec.json.decode((tmp_path / "frozen.json").read_bytes(), type=freeze.Frozen)
    assert (frozen.commit, frozen.dirty) == ("", ())
