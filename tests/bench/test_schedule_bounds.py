"""No schedule takes less than the bound for the executions of a recorded run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.bench.schedule_bounds import least_seconds, least_seconds_per_step
from gyre_hpc.simulate.bounds import work_conservation_s
from gyre_hpc.simulate.recorded import read_recording
from gyre_hpc.simulate.workload import GroupWork
from gyre_hpc.simulate.world import Place, World
from tests.simulate.written_run import Written, config, write_run


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_run(tmp_path_factory.mktemp("bounds") / "run", config())


def test_a_recorded_run_took_no_less_than_its_bound(written: Written) -> None:
    served = written.outcome.published
    took = (served[max(served)] - served[min(served)]) / (max(served) - min(served))
    assert 0.3 * took < least_seconds_per_step(written.folder, min(served), max(served)) < took


def test_with_extra_dispatch_only_work_conservation_is_left(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config("schedule.extra_dispatch=1")).folder
    recording = read_recording(run)
    groups = recording.workload.recorded[4:8]
    least = work_conservation_s(groups, recording.world) / 2
    assert least_seconds_per_step(run, 2, 4) == pytest.approx(least)


def test_each_burst_waits_for_its_own_longest_execution() -> None:
    """Two cells of 8 places: one long execution holds its burst, then its group is trained by the whole machine."""
    short, long = (GroupWork((seconds, seconds), (1.0, 1.0), seconds) for seconds in (1.0, 50.0))
    machine = World(cells=(Place(1.0, 8), Place(1.0, 8)))
    each = 50.0 + 2.0 / machine.nodes
    assert least_seconds([short, long, long, short], machine, 2) == pytest.approx(2 * each)
    assert least_seconds([short, long, long, short], machine, 4) == pytest.approx(50.0 + 4.0 / machine.nodes)
    assert least_seconds([short, long, long, short], machine, 0) < each
