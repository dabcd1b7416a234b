"""A satellite joins a batch already under way, and the step is exactly the one its record describes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gyre_hpc.controller.journal.entries import StepTaken
from gyre_hpc.report import metrics as m
from tests.end_to_end.conftest import Start
from tests.end_to_end.runs import HERE, LIMIT_S, REPO, Plan

CORE, SATELLITE = 0, 1


def test_a_held_back_group_forces_a_satellite_into_the_batch_under_way(start: Start, tmp_path: Path) -> None:
    plan = Plan(tmp_path / "plan", hold=range(4, 8))
    run = start(
        *plan.overrides,
        "engine.capacity=6",
        "schedule.steps=1",
        "trainer.tokens_per_s=25",
    )
    first = run.until_metric(m.Join)
    assert (first.cell, first.mid_batch) == (CORE, False)
    plan.release()
    join = run.until_metric(m.Join, lambda line: line.cell == SATELLITE)
    assert join.mid_batch and join.batch == first.batch
    step = run.until_entry(StepTaken)
    owners = dict(step.owners)
    assert set(owners) == {CORE, SATELLITE} and all(owners.values())
    names = [name for work in owners.values() for name in work]
    assert len(names) == len(set(names)) >= 8
    run.finish()
    assert run.summary()["joins_mid_batch"] == 1
    replay = subprocess.run(
        [sys.executable, str(HERE / "replay_step.py"), str(run.folder)],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert replay.returncode == 0, replay.stderr
    replayed, trained = replay.stdout.split()
    assert replayed == trained
