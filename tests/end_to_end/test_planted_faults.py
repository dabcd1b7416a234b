"""What goes wrong inside an execution is told apart, scored or excluded, and the rest of its group still trains."""

from __future__ import annotations

from pathlib import Path

from gyre_hpc.controller.journal.entries import StepTaken
from gyre_hpc.records import ClosingReason
from tests.end_to_end.agreement import check_agreement
from tests.end_to_end.conftest import Start
from tests.end_to_end.runs import Plan

SILENT, HANGING, BROKEN = 1, 2, 6


def test_timeout_evaluator_failure_and_silence_are_told_apart(start: Start, tmp_path: Path) -> None:
    plan = Plan(tmp_path / "plan", silent=[SILENT], hang=[HANGING], broken=[BROKEN])
    run = start(*plan.overrides, "schedule.steps=1", "harness.timeout_s=20", "harness.overall_timeout_s=120")
    run.finish()
    outcomes = {id: entry.outcome for id, entry in run.outcomes().items()}
    silent, hanging, broken = outcomes[SILENT], outcomes[HANGING], outcomes[BROKEN]
    assert (silent.reason, silent.assessment) == (ClosingReason.INFRASTRUCTURE, None)
    assert hanging.reason is ClosingReason.HARNESS_TIMEOUT and hanging.assessment is not None
    assert hanging.assessment.score == 0.0
    assert broken.reason is ClosingReason.COMPLETED and broken.assessment is not None
    assert (broken.assessment.valid, broken.assessment.score) == (False, None)
    assert "no number: broken" in broken.assessment.evidence
    [step] = run.entries(StepTaken)
    assert step.executions == 6
    assert run.summary()["executions"] == {"completed": 6, "harness_timeout": 1, "infrastructure": 1}
    check_agreement(run)
