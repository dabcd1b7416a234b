"""What is read from a run folder is what happened; simulated again it takes as long."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path

import pytest

from gyre_hpc import cli
from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.layout import RunLayout
from gyre_hpc.report import metrics as m
from gyre_hpc.simulate.from_run import machine, overridden, simulated
from gyre_hpc.simulate.recorded import Recorded, read_recording
from gyre_hpc.simulate.workload import GroupWork
from tests.simulate.written_run import SNAPSHOT_S, Written, config, world, write_run


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_run(
        tmp_path_factory.mktemp("recorded") / "run", config("tasks.heldout=2", "tasks.evaluation_repeats=2")
    )


@pytest.fixture
def copy(written: Written, tmp_path: Path) -> RunLayout:
    shutil.copytree(written.folder, tmp_path / "run")
    return RunLayout(tmp_path / "run")


def test_durations_costs_and_fates_of_groups_are_read_back(written: Written) -> None:
    found = read_recording(written.folder).workload
    assert len(found.recorded) == len(written.groups) == 12
    for mine, given in zip(found.recorded, written.groups, strict=True):
        assert mine.seconds == pytest.approx(given.seconds, abs=1e-5)
        assert mine.valid == given.valid
        assert mine.scored_s == pytest.approx(given.scored_s, abs=1e-5)
        kept = [cost * given.is_valid(index) for index, cost in enumerate(given.training)]
        assert mine.training == pytest.approx(kept, abs=1e-5)
        assert mine.micro_steps == round(given.micro_steps * sum(kept) / (sum(given.training) or 1))
    assert found.heldout_s == pytest.approx([8.0, 12.0] * 4, abs=1e-5)


def test_costs_of_the_machine_are_read_back(written: Written) -> None:
    run = config("tasks.heldout=2", "tasks.evaluation_repeats=2")
    found, given = read_recording(written.folder).world, world(run)
    assert found.switch == given.switch
    assert found.training.step_s == pytest.approx(1.5, abs=1e-5)
    assert found.training.snapshot_s == pytest.approx(SNAPSHOT_S)
    assert found.publish_s == pytest.approx(0.75, abs=1e-5)
    assert [cell.start_s for cell in found.cells] == pytest.approx([5.0, 6.0], abs=1e-5)
    assert (found.heldout, found.capacities, found.limit_s) == (4, (3, 3), 500.0)


def test_a_recording_simulated_again_takes_as_long(written: Written) -> None:
    recording = read_recording(written.folder)
    again = simulated(recording, recording.config)
    assert recording.wall_s == pytest.approx(written.outcome.seconds, rel=1e-6)
    assert again.seconds == pytest.approx(written.outcome.seconds, rel=1e-6)
    assert again.switches == written.outcome.switches
    assert again.staleness == written.outcome.staleness


def test_other_settings_meet_the_same_groups(written: Written) -> None:
    recording = read_recording(written.folder)
    colocate = simulated(recording, overridden(recording.config, ["schedule.policy=colocate"]))
    longer = simulated(
        recording, overridden(recording.config, ["schedule.steps=20", "schedule.extra_dispatch=0.5"])
    )
    assert colocate.seconds > written.outcome.seconds
    assert len(longer.steps) == 20 and longer.staleness > 0.5


def test_groups_beyond_the_recorded_ones_are_drawn_from_them(written: Written) -> None:
    workload = read_recording(written.folder).workload
    first = list(islice(workload.groups(0, 3), 40))
    assert tuple(first[:12]) == workload.recorded and set(first) <= set(workload.recorded)
    assert list(islice(workload.groups(0, 3), 40)) == first
    assert list(islice(workload.groups(1, 3), 40)) != list(islice(workload.groups(2, 3), 40))


def test_groups_change_their_size_by_members_drawn_again() -> None:
    group = GroupWork((1.0, 2.0), (3.0, 4.0), 1.5, (True, False), micro_steps=4)
    more = next(Recorded((group,)).groups(0, 4))
    assert more.seconds[:2] == (1.0, 2.0) and set(more.seconds[2:]) <= {1.0, 2.0}
    assert more.micro_steps == 8 and len(more.training) == len(more.valid) == 4
    assert next(Recorded((group,)).groups(0, 1)) == group._replace(
        seconds=(1.0,), training=(3.0,), valid=(True,), micro_steps=2
    )


def test_the_verb_prints_simulated_and_recorded_wall_time(
    written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", "--from", str(written.folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["from"]
    assert found["simulated"]["wall_s"] == pytest.approx(found["recorded"]["wall_s"], rel=1e-6)
    assert found["simulated"]["steps"] == found["recorded"]["steps"] == 6
    assert found["simulated"]["gap_wc"] > 0
    assert cli.main(["simulate", "--from", str(written.folder), "schedule.policy=colocate"]) == 0
    assert "recorded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("schedule.policy=asyn", "did you mean schedule.policy=async"),
        ("schedule.stepz=3", "schedule.steps"),
        ("model.max_context=3", "does not depend on it"),
        ("schedule.steps", "does not depend on it"),
    ],
)
def test_overrides_that_mean_nothing_are_named(written: Written, word: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        overridden(config(), [word])


def test_a_run_without_a_step_names_what_it_lacks(copy: RunLayout) -> None:
    for path in copy.journal.iterdir():
        path.unlink()
    with pytest.raises(MissingInput, match="no step and publication in journal/"):
        read_recording(copy.root)


def test_a_run_without_shards_names_them(copy: RunLayout) -> None:
    copy.manifest.unlink()
    with pytest.raises(MissingInput, match="no execution in shards/"):
        read_recording(copy.root)


def test_a_switch_that_never_happened_is_named_where_its_cost_matters(copy: RunLayout) -> None:
    kept = [
        line
        for line in m.read_metrics(copy.metrics)
        if not (isinstance(line, m.Switch) and line.role == "rollout")
    ]
    copy.metrics.unlink()
    writer = m.MetricsWriter(copy.metrics)
    for line in kept:
        writer.write(line)
    writer.close()
    recording = read_recording(copy.root)
    with pytest.raises(MissingInput, match="no switch to rollout"):
        machine(recording, recording.config)
    fixed = overridden(recording.config, ["schedule.policy=async", "schedule.training_cells=1"])
    assert machine(recording, fixed).switch.return_s == 0


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="no such file"):
        read_recording(tmp_path)
