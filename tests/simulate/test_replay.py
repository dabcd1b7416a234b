"""Live runs: a journal replayed gives the decisions it holds; a recording gives the wall time of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gyre_hpc.bench import paced
from gyre_hpc.config import load_run_config
from gyre_hpc.controller.journal.history import read_history
from gyre_hpc.controller.train import schedule_settings
from gyre_hpc.layout import RunLayout
from gyre_hpc.simulate.from_run import overridden, settings_of, simulated
from gyre_hpc.simulate.recorded import Recording, read_recording

TIMEOUT_S = 500.0
"""Of one paced run, on a machine many times slower than one of its own."""


Record = Callable[..., Path]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Record a paced run; one run for each list of overrides."""
    folder = tmp_path_factory.mktemp("paced")
    policy = folder / "policy"
    paced.write_random_policy(policy)
    known: dict[tuple[str, ...], Path] = {}

    def run(*overrides: str) -> Path:
        if overrides not in known:
            root = folder / f"run-{len(known)}"
            paced.run([*paced.overrides(paced.Script(), policy, root), *overrides], root, TIMEOUT_S)
            known[overrides] = next(root.glob("paced-*"))
        return known[overrides]

    return run


GYRE = ("schedule=gyre", "schedule.steps=6")
COLOCATE = ("schedule=colocate", "schedule.steps=6")


def rolling_s(recording: Recording) -> float:
    """From the first cell that serves to the stop: what the schedule answers for."""
    return recording.wall_s - min(place.start_s for place in recording.world.cells)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("overrides", [GYRE, COLOCATE])
def test_a_live_journal_gives_the_same_decisions(record: Record, overrides: tuple[str, ...]) -> None:
    run = record(*overrides)
    journal = RunLayout(run).journal
    assert not [*journal.glob("*.snapshot")], "it is replayed whole"
    assert read_history(journal, schedule_settings(load_run_config(run))).state.finished


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("overrides", [GYRE, COLOCATE])
def test_simulated_wall_time_is_that_of_the_live_run(record: Record, overrides: tuple[str, ...]) -> None:
    recording = read_recording(record(*overrides))
    again = simulated(recording, recording.config)
    start = min(place.start_s for place in recording.world.cells)
    assert again.seconds - start == pytest.approx(rolling_s(recording), rel=0.1)
    assert len(again.steps) == recording.steps and again.staleness == recording.staleness


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_another_policy_is_predicted_from_a_recording(record: Record) -> None:
    """colocate as gyre's recording predicts it, against a live colocate run of the same tasks and seeds."""
    gyre, colocate = read_recording(record(*GYRE)), read_recording(record(*COLOCATE))
    predicted = simulated(gyre, overridden(gyre.config, ["schedule.policy=colocate"]))
    assert settings_of(colocate.config).policy == "colocate"
    start = min(place.start_s for place in gyre.world.cells)
    assert predicted.seconds - start == pytest.approx(rolling_s(colocate), rel=0.1)
