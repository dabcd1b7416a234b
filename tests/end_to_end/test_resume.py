"""A run that loses its controller, by force or on request, goes on where it stood: nothing finished is lost or doubled."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from gyre_hpc.controller.journal.entries import AttemptOpened, CheckpointWritten, Resumed, StepTaken
from gyre_hpc.transport.links import read_secret
from gyre_hpc.transport.region_files import run_folder
from gyre_hpc.transport.regions import run_key
from tests.end_to_end.agreement import check_agreement
from tests.end_to_end.conftest import Start
from tests.end_to_end.runs import Plan, Run, all_gone, refused

LAST = 15
"""The last execution of the second burst of SMALL; held back, it keeps the burst open with seven finished executions."""


def until_one_is_missing(run: Run) -> None:
    """The first step is taken and every execution of the second burst but the held one has its outcome."""
    run.until("all outcomes but one", lambda: len(run.outcomes()) == LAST)
    assert run.versions() == [1]


def attempts(run: Run, execution: int) -> int:
    return len([entry for entry in run.entries(AttemptOpened) if entry.execution == execution])


def test_after_kill_9_of_the_controller_no_finished_execution_is_lost_or_doubled(
    start: Start, tmp_path: Path
) -> None:
    plan = Plan(tmp_path / "plan", hold=[LAST])
    run = start(*plan.overrides, "cluster.orphan_grace_s=3")
    until_one_is_missing(run)
    family, before = run.family(), run.outcomes()
    run.kill()
    assert all_gone(family) == []
    plan.release()
    run.resume().finish()
    after = run.outcomes()
    assert sorted(after) == list(range(LAST + 1))
    assert {id: after[id] for id in before} == before
    assert [attempts(run, id) for id in after] == [1] * LAST + [2]
    assert run.versions() == [1, 2] and len(run.entries(Resumed)) == 1
    assert run.summary()["steps"] == 2
    check_agreement(run)
    run.resume().finish()
    assert (run.outcomes(), run.versions()) == (after, [1, 2])


def test_signals_end_a_run_with_a_checkpoint_and_it_resumes(start: Start, tmp_path: Path) -> None:
    plan = Plan(tmp_path / "plan", hold=[LAST])
    shared = tmp_path / "shared"
    run = start(*plan.overrides, "trainer.checkpoint_every=5", f"engine.sglang.kv_folder={shared}")
    until_one_is_missing(run)
    key = run_key(read_secret(run.layout))
    pages = [shared / key / "a.page", shared / "of-another-run" / "a.page"]
    for page in pages:
        page.parent.mkdir(parents=True)
        page.touch()
    assert run.entries(CheckpointWritten) == []
    code, output = refused("train", f"resume={run.folder}")
    assert code == 3 and f"pid {run.pid}" in output
    for epoch, (number, shell_code) in enumerate(((signal.SIGTERM, 143), (signal.SIGINT, 130)), start=1):
        run.until("the held execution", lambda epoch=epoch: attempts(run, LAST) == epoch)
        family = run.family()
        run.signal(number)
        assert run.wait() == shell_code, run.tail()
        assert all_gone(family) == []
        assert f"gyre train resume={run.folder}" in run.tail()
        assert not run_folder(key).exists() and all(page.exists() for page in pages), "the run may go on"
        assert [entry.version for entry in run.entries(CheckpointWritten)] == [1]
        assert (run.layout.checkpoint(run.versions()[-1]) / "trainer.json").is_file()
        if number is signal.SIGINT:
            plan.release()
        run.resume()
    run.finish()
    assert run.versions() == [1, 2] and sorted(run.outcomes()) == list(range(LAST + 1))
    check_agreement(run)
    assert not run_folder(key).exists() and [page.exists() for page in pages] == [False, True]


@pytest.mark.full
def test_a_controller_killed_right_after_a_step_takes_no_version_twice(start: Start, tmp_path: Path) -> None:
    run = start(*Plan(tmp_path / "plan").overrides, "cluster.orphan_grace_s=3")
    for step in (1, 2):
        run.until_entry(StepTaken, lambda entry, step=step: entry.version >= step)
        family = run.family()
        run.kill()
        assert all_gone(family) == []
        run.resume()
    run.finish()
    assert run.versions() == list(range(1, len(run.versions()) + 1))
    assert run.summary()["steps"] == 2
    check_agreement(run)
