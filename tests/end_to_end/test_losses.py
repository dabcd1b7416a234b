"""kill -9 of a real satellite or core exactly in a phase of the burst: the run takes its steps, its records agree.

A cell stops at a named point (stops/sitecustomize.py) until it is killed there, so no blow misses its phase. The points
are those of tests/controller/test_losses.py, which goes through all of them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gyre_hpc.controller.journal.entries import CheckpointWritten
from gyre_hpc.schedule import protocol as p
from tests.controller.losses import counted, every_micro_step_is_trained_once, executions_weigh_the_same
from tests.end_to_end.agreement import check_agreement
from tests.end_to_end.runs import REPO, Plan, Run

CORE, SATELLITE = 0, 1
HERE = Path(__file__).parent
ORDERS = ("cluster.restarts=20", "trainer.keep_checkpoints=1")


class Stops:
    """Where cells stop. A stop is armed before a cell comes there, and holds until the cell is killed or let go."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder

    @property
    def environment(self) -> dict[str, str]:
        return {"GYRE_TEST_STOPS": str(self.folder), "PYTHONPATH": f"{HERE / 'stops'}:{REPO}"}

    def arm(self, cell: int, point: str) -> None:
        (self.folder / f"{cell}.{point}").touch()

    def await_at(self, run: Run, cell: int, point: str) -> int:
        """The pid of the cell's leader, which stands at the point."""
        reached = self.folder / f"{cell}.{point}.reached"
        run.until(f"cell {cell} to stop: {point}", reached.exists)
        return int(reached.read_text())

    def kill(self, run: Run, cell: int, point: str) -> None:
        """The cell and all its processes, where it stands."""
        lost = len(run.events(p.CellLost))
        os.killpg(self.await_at(run, cell, point), signal.SIGKILL)
        run.until("the cell counted out", lambda: len(run.events(p.CellLost)) > lost)

    def release(self, run: Run, cell: int, point: str) -> None:
        self.await_at(run, cell, point)
        (self.folder / f"{cell}.{point}.go").touch()


@pytest.fixture
def stops(tmp_path: Path) -> Stops:
    return Stops(tmp_path / "stops")


Begin = Callable[..., Run]


def both_at_work(start: Begin, stops: Stops, folder: Path, *overrides: str) -> Run:
    """Core and satellite train the first batch and stand at their first micro-steps; no execution is left."""
    stops.arm(CORE, "micro-step begins")
    stops.arm(SATELLITE, "micro-step begins")
    plan = Plan(folder, hold=range(4, 8))
    run = start(*plan.overrides, *ORDERS, *overrides, env=stops.environment)
    stops.await_at(run, CORE, "micro-step begins")
    plan.release()
    stops.await_at(run, SATELLITE, "micro-step begins")
    return run


def go_on(run: Run, stops: Stops) -> None:
    for cell in (CORE, SATELLITE):
        stops.release(run, cell, "micro-step begins")


def check(run: Run, steps: int, *, lost: int) -> None:
    run.finish()
    entries = run.journal()
    assert [step.version for step in counted(entries)][-1] == run.versions()[-1] and len(
        counted(entries)
    ) == steps
    assert run.versions() == list(range(1, len(run.versions()) + 1))
    every_micro_step_is_trained_once(entries)
    executions_weigh_the_same(entries)
    check_agreement(run)
    assert len(run.events(p.CellLost)) == lost
    newest = run.entries(CheckpointWritten)[-1].folder
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == [Path(newest).name]


def test_a_satellite_with_its_gradient_on_the_way_and_a_core_within_its_step_are_lost(
    start: Begin, stops: Stops, tmp_path: Path
) -> None:
    run = both_at_work(start, stops, tmp_path / "plan", "schedule.steps=1")
    stops.arm(SATELLITE, "wrote gradient")
    stops.arm(CORE, "within the optimizer step")
    go_on(run, stops)
    stops.kill(run, SATELLITE, "wrote gradient")
    stops.kill(run, CORE, "within the optimizer step")
    check(run, 1, lost=2)
    assert len(run.events(p.CoreRestored)) == 1 and run.versions() == [1]


SATELLITES = (
    "micro-step is done",
    "write gradient",
    "say Contribution",
    "said Contribution",
    "snapshot loads",
)
CORES = (
    "micro-step is done",
    "half of gradient",
    "optimizer step begins",
    "say BatchCommitted",
    "checkpoint is half written",
    "checkpoint is on disk",
    "said WeightsPublished",
)
RETURNS = ("half of weights", "trainer off-loaded")
"""Of the core on its way back to rollout, which the last burst of a run does not take."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("cell", "point", "burst"),
    [
        *((SATELLITE, point, 2) for point in SATELLITES),
        *((CORE, point, 2) for point in CORES),
        *((CORE, point, 1) for point in RETURNS),
    ],
)
def test_a_cell_is_lost_in_this_phase(
    cell: int, point: str, burst: int, start: Begin, stops: Stops, tmp_path: Path
) -> None:
    planned = ("schedule.steps=2", f"schedule.steps_per_burst={burst}")
    run = both_at_work(start, stops, tmp_path / "plan", *planned)
    stops.arm(cell, point)
    go_on(run, stops)
    stops.kill(run, cell, point)
    check(run, 2, lost=1)
