"""A journal fed to the schedule gives the decisions it holds; a recording gives the wall time of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gyre_hpc.bench import paced
from gyre_hpc.controller.journal.entries import AnyEntry, Happened
from gyre_hpc.controller.journal.journal import read_journal
from gyre_hpc.layout import RunLayout
from gyre_hpc.schedule.protocol import Dispatch, Launch
from gyre_hpc.schedule.settings import Settings
from gyre_hpc.simulate.from_run import overridden, settings_of, simulated
from gyre_hpc.simulate.recorded import Recording, read_recording
from gyre_hpc.simulate.replay import replay, replay_run
from gyre_hpc.simulate.simulator import simulate
from tests.simulate.tiny import Given, plan, world
from tests.simulate.watch import watched

TIMEOUT_S = 500.0
"""Of one paced run, on a machine many times slower than one of its own."""


def journal_of(settings: Settings) -> list[AnyEntry]:
    """What a run with this schedule would have journaled."""
    with watched() as watch:
        simulate(settings, world(2), Given())
    return [Happened(0.0, event, decisions) for event, decisions in watch.journal]


def test_a_journal_of_the_schedule_gives_its_decisions_again() -> None:
    settings = plan(2, steps=3)
    found = replay(journal_of(settings), settings)
    assert found.difference is None
    assert found.state.finished and found.state.steps_done == 3 and found.decisions > 20


def test_the_first_other_decision_is_named() -> None:
    settings = plan(2, steps=3)
    entries = journal_of(settings)
    where = next(i for i, e in enumerate(entries) if isinstance(e, Happened) and e.decisions and i > 9)
    other = entries[where]
    assert isinstance(other, Happened)
    entries[where] = Happened(0.0, other.event, ())
    found = replay(entries, settings)
    assert found.difference is not None and found.events == where
    assert found.difference.decided == other.decisions and found.difference.journaled == ()
    assert f"event {where}" in str(found.difference)


def test_the_schedule_of_another_run_decides_otherwise() -> None:
    found = replay(journal_of(plan(2, steps=3)), plan(2, steps=3, batch_groups=1))
    assert found.difference is not None
    assert isinstance(found.difference.decided[0], Dispatch | Launch)


# ---- live runs ----------------------------------------------------------------------------------------------------

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
    found = replay_run(run)
    assert found.difference is None, str(found.difference)
    entries = [entry for entry in read_journal(RunLayout(run).journal) if isinstance(entry, Happened)]
    assert found.events == len(entries) and found.state.finished


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
