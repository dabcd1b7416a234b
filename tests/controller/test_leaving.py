"""A controller that leaves before its run is done: what is held goes on in the next one, what is saved is the newest."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from gyre_hpc.controller.controller import Controller
from gyre_hpc.controller.ending import leaving
from gyre_hpc.controller.ending.ending import Cause
from gyre_hpc.controller.executions.walltime import HOLD, RUN
from gyre_hpc.controller.journal.entries import CheckpointWritten, Outcome, StepTaken
from gyre_hpc.controller.journal.journal import read_journal
from gyre_hpc.transport import messages as msg
from tests.controller.world import make_controller, nothing, small_run

STEPS = 4


async def test_a_run_whose_rest_does_not_fit_leaves_and_the_next_job_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "QUIET_S", 0.3)
    controller = make_controller(tmp_path, small_run(STEPS), 1, nothing)
    permits = iter([RUN] * 11)
    hooks = dataclasses.replace(controller.executions.hooks, permit=lambda: next(permits, HOLD))
    controller.executions.hooks = hooks
    ending = await controller.run()
    assert ending is not None and ending.cause is Cause.NOTHING_FITS
    controller = make_controller(tmp_path, small_run(STEPS), 2, nothing)
    assert await controller.run() is None
    entries = list(read_journal(tmp_path / "journal"))
    outcomes = Counter(entry.outcome.execution for entry in entries if isinstance(entry, Outcome))
    assert set(outcomes.values()) == {1}
    assert [entry.version for entry in entries if isinstance(entry, StepTaken)] == list(range(1, STEPS + 1))


async def test_a_signal_ends_a_run_with_a_checkpoint_of_the_newest_version(tmp_path: Path) -> None:
    config = small_run(STEPS)
    config.trainer.checkpoint_every = 100

    def watch(controller: Controller, message: msg.Message) -> None:
        if isinstance(message, msg.CommitBatch) and message.version == 2:
            controller.departure.signalled("SIGTERM")

    controller = make_controller(tmp_path, config, 1, watch)
    ending = await controller.run()
    assert str(ending) == "SIGTERM"
    written = [entry for entry in read_journal(tmp_path / "journal") if isinstance(entry, CheckpointWritten)]
    assert written[-1].version == controller.driver.state.core_version >= 2
    assert controller.departure.record.checkpoint_s > 0


async def test_an_end_that_comes_sooner_shortens_the_wait_for_the_checkpoint(tmp_path: Path) -> None:
    """The core never answers; the grace time is cut to nothing while the controller waits."""
    asked: list[float] = []

    def left_s() -> float:
        asked.append(60.0 if len(asked) < 2 else 0.0)
        return asked[-1]

    controller = make_controller(tmp_path, small_run(STEPS), 1, nothing)
    controller.batches.committing = True
    async with asyncio.timeout(30):
        await controller.leaving.save(left_s)
    assert asked == [60.0, 60.0, 0.0]
