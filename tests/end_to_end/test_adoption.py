"""The controller dies in the middle of model calls: resumed within the grace, it goes on with the very same attempts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from gyre_hpc.controller.journal.entries import AttemptOpened, Outcome, Resumed
from gyre_hpc.gateway.call_log import CallLogReader, call_logs
from gyre_hpc.gateway.logged_call import LoggedCall
from gyre_hpc.shards.manifest import read_manifest
from tests.end_to_end.agreement import check_agreement
from tests.end_to_end.conftest import Start
from tests.end_to_end.runs import Plan, Run, all_gone, lives

BUSY = ("engine.tokens_per_s=30",)
"""Calls last for seconds, so that there are always some under way."""
REFERENCE = ("tasks.family=patchkit", "model.max_context=2048", "trainer.tokens_per_micro_step=2048")
"""The shipped harness on its own tasks."""


def open_calls(run: Run) -> list[LoggedCall]:
    """Model calls that sample or wait."""
    if not (logs := call_logs(run.layout)):
        return []
    reader = CallLogReader(logs[-1])
    reader.poll()
    calls = [call for calls in reader.executions.values() for call in calls.values()]
    return [call for call in calls if call.finished is None]


def attempts(run: Run) -> Counter[int]:
    return Counter(entry.execution for entry in run.entries(AttemptOpened))


def superseded(run: Run) -> int:
    """Attempts at rest that count for nothing."""
    return sum(entry.superseded for line in read_manifest(run.layout) for entry in line.executions)


def check_undisturbed(run: Run) -> None:
    """No execution was launched twice, no call was lost, nothing counts double."""
    counts, outcomes = attempts(run), run.outcomes()
    assert set(counts) == set(outcomes) and set(counts.values()) == {1}
    assert {entry.outcome.attempt for entry in run.entries(Outcome)} == {1}
    assert run.summary()["calls_lost"] == 0 and superseded(run) == 0
    assert len(call_logs(run.layout)) == 1, "one gateway served the whole run"
    check_agreement(run)


def test_a_controller_resumed_within_the_grace_goes_on_with_the_same_attempts(start: Start) -> None:
    run = start(*REFERENCE, *BUSY)
    run.until("calls under way", lambda: len(open_calls(run)) >= 2)
    gateway, runner = run.service("gateway.process"), run.service("executions.runner")
    cells = run.processes("gyre_hpc.cells.leader")
    run.kill()
    assert all_gone(cells) == [] and lives(gateway) and lives(runner)
    cut = {call.opened.call for call in open_calls(run)}
    run.resume().finish()
    assert cut and run.versions() == [1, 2] and len(run.entries(Resumed)) == 1
    check_undisturbed(run)
    assert all_gone([gateway, runner]) == []


def test_after_the_grace_nothing_is_left_and_executions_are_launched_again(
    start: Start, tmp_path: Path
) -> None:
    run = start(*Plan(tmp_path / "plan", calls=3, max_tokens=24).overrides, *BUSY, "cluster.orphan_grace_s=3")
    run.until("calls under way", lambda: len(open_calls(run)) >= 2)
    family, before = run.family(), set(run.outcomes())
    run.kill()
    assert all_gone(family) == []
    started = set(attempts(run))
    run.resume().finish()
    after = attempts(run)
    assert started - before and {id: after[id] for id in started - before} == dict.fromkeys(
        started - before, 2
    )
    assert run.versions() == [1, 2] and run.summary()["calls_lost"] == 0
    check_agreement(run)
