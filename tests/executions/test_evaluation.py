"""Validity apart from score: what counts as an assessment, what is tried again, what stays untouched."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.executions.evaluation import EVIDENCE_CHARACTERS, Evaluator, read_score
from gyre_hpc.executions.launcher import Launcher
from gyre_hpc.executions.sandbox import Sandbox
from tests.executions.toy_family import CRASHING, HONEST, ToyTask

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


@given(values)
def test_only_a_finite_number_from_0_to_1_is_a_score(value: object) -> None:
    assessment = read_score(json.dumps({"score": value}) + "\n")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    score = float(value) if isinstance(value, int | float) and number and abs(value) <= 1 else math.nan
    assert assessment.valid == (0 <= score <= 1)
    assert assessment.score == (value if assessment.valid else None)
    assert assessment.valid or assessment.reason


@given(st.text(max_size=300))
def test_text_without_a_verdict_is_invalid_and_kept_as_evidence(text: str) -> None:
    assessment = read_score(text)
    assert assessment.score is None
    assert assessment.evidence == text[-EVIDENCE_CHARACTERS:]


def test_other_output_around_the_verdict_does_no_harm() -> None:
    assert read_score('collected 3\n{"a": 1}\n{"score": 0.5, "evidence": "2/4"}\nbye').score == 0.5


def test_two_verdicts_are_ambiguous() -> None:
    assessment = read_score('{"score": 1.0}\n{"score": 0.25}\n')
    assert (assessment.valid, assessment.reason) == (False, "2 score lines")


@pytest.fixture
def evaluator(launcher: Launcher, sandbox: Sandbox) -> Evaluator:
    return Evaluator(launcher, sandbox, timeout_s=60, attempts=3, concurrent=2, back_off_s=0.01)


async def test_the_preserved_workspace_is_scored(evaluator: Evaluator, workspace: Path) -> None:
    (workspace / "answer").write_text("0.75")
    assessment = await evaluator.assess(ToyTask(), workspace.parent)
    assert (assessment.score, assessment.valid, assessment.evidence) == (0.75, True, "read")


async def test_a_missing_answer_is_invalid_never_zero(evaluator: Evaluator, workspace: Path) -> None:
    task = ToyTask()
    assessment = await evaluator.assess(task, workspace.parent)
    assert (assessment.score, assessment.valid) == (None, False)
    assert "answer: No such file" in assessment.evidence
    assert len(task.tries) == 3


async def test_an_evaluator_that_fails_once_is_tried_again(evaluator: Evaluator, workspace: Path) -> None:
    (workspace / "answer").write_text("1")
    task = ToyTask(scripts=(CRASHING, HONEST))
    assert (await evaluator.assess(task, workspace.parent)).score == 1.0
    assert len(task.tries) == 2


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (CRASHING, "evaluator crashed (exit code 7)"),
        ("echo '{\"score\": 1.0}'; exit 1", "evaluator crashed (exit code 1)"),
        ("kill -KILL $$", "evaluator crashed (exit code -9)"),
        ("true", "no score line"),
        ("echo '{\"score\": NaN}'", "score is not finite: nan"),
        ('echo \'{"score": "1.0"}\'', "score is not a number: '1.0'"),
        ("echo '{\"score\": 1.5}'", "score is outside 0..1: 1.5"),
    ],
)
async def test_a_failing_evaluator_says_why(
    launcher: Launcher, sandbox: Sandbox, workspace: Path, script: str, reason: str
) -> None:
    evaluator = Evaluator(launcher, sandbox, timeout_s=60, attempts=1, concurrent=2)
    assessment = await evaluator.assess(ToyTask(scripts=(script,)), workspace.parent)
    assert (assessment.score, assessment.valid, assessment.reason) == (None, False, reason)


async def test_a_hanging_evaluator_is_invalid(launcher: Launcher, sandbox: Sandbox, workspace: Path) -> None:
    evaluator = Evaluator(launcher, sandbox, timeout_s=0.3, attempts=1, concurrent=2)
    task = ToyTask(scripts=("echo partial; sleep 1000",))
    assessment = await evaluator.assess(task, workspace.parent)
    assert (assessment.valid, assessment.reason) == (False, "evaluator time-out (0.3 s)")
    assert assessment.evidence == "partial"


async def test_the_overall_limit_bounds_all_tries(evaluator: Evaluator, workspace: Path) -> None:
    task = ToyTask(scripts=("sleep 1000",))
    assessment = await evaluator.assess(task, workspace.parent, within_s=0.5)
    assert (assessment.valid, "overall limit" in assessment.reason) == (False, True)
    assert not (workspace.parent / "evaluation").exists()


async def test_the_evaluator_works_on_a_copy_and_leaves_nothing(
    evaluator: Evaluator, workspace: Path
) -> None:
    (workspace / "answer").write_text("0.5")
    vandal = 'rm -rf "$1"/answer; touch "$1"/left; chmod 000 .; echo \'{"score": 0.5}\''
    task = ToyTask(scripts=(vandal,))
    assert (await evaluator.assess(task, workspace.parent)).valid
    assert [path.name for path in workspace.iterdir()] == ["answer"]
    assert [path.name for path in workspace.parent.iterdir()] == ["workspace"]


async def test_odd_files_in_the_workspace_do_not_stop_the_assessment(
    evaluator: Evaluator, workspace: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o750)
    (workspace / "answer").write_text("0.5")
    (workspace / "dangling").symlink_to("nowhere")
    (workspace / "away").symlink_to(precious)
    os.mkfifo(workspace / "pipe")
    assert (await evaluator.assess(ToyTask(), workspace.parent)).score == 0.5
    assert precious.stat().st_mode & 0o777 == 0o750


async def test_an_evaluator_that_cannot_start_is_invalid(
    launcher: Launcher, sandbox: Sandbox, workspace: Path
) -> None:
    class Nowhere(ToyTask):
        def evaluator(self, hidden: Path) -> list[str]:
            return [str(hidden / "missing")]

    assessment = await Evaluator(launcher, sandbox, 60, 1, 2).assess(Nowhere(), workspace.parent)
    assert (assessment.valid, assessment.reason) == (False, "evaluator did not start")
