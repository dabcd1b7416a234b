"""`gyre train --multirun ... hydra/launcher=gyre_slurm` with stand-ins for Slurm: what is submitted, recorded, told."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from gyre_hpc.cli import main
from gyre_hpc.composition import compose
from gyre_hpc.config import load_run_config
from gyre_hpc.errors import MissingInput
from gyre_hpc.layout import RunLayout
from gyre_hpc.sweep.manifest import Entry, Manifest
from gyre_hpc.sweep.points import Point, points_of
from gyre_hpc.sweep.submission import submit_points
from tests.sweep.fake_slurm import FakeSlurm
from tests.sweep.sweeps import NOON

SITE = Path(__file__).parents[2] / "slurm" / "sites" / "example.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sweep"


@pytest.fixture
def slurm(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(sys, "argv", ["gyre"])  # the application sets both
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    return FakeSlurm(tmp_path / "slurm", folder / "manifest.jsonl", monkeypatch)


def points(tmp_path: Path, *swept: str, rest: tuple[str, ...] = ()) -> list[Point]:
    given = ["experiment=quickstart", f"root={tmp_path}/runs", *rest]
    return points_of([[*given, word] for word in swept], given)


def submitted(folder: Path, wanted: list[Point], **options: bool) -> list[Entry]:
    told: list[str] = []
    entries = submit_points(wanted, Manifest.opened(folder), tell=told.append, **options)  # type: ignore[arg-type]
    assert len(told) == len(wanted), "one line per point"
    assert entries == [Manifest.opened(folder).find(point) for point in wanted]
    return entries


def jobs(entries: list[Entry]) -> list[str | None]:
    return [entry.job for entry in entries]


def test_a_bad_point_is_recorded_before_the_first_is_submitted_and_the_others_go_on(
    slurm: FakeSlurm, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One point cannot be composed, one would miss its model, one is refused by sbatch, one is good."""
    slurm.refuse("schedule_colocate")
    command = [
        "train",
        "--multirun",
        "experiment=quickstart",
        "schedule=async,colocate",
        "objective.j_max=5,abc",
    ]
    where = [f"root={tmp_path}/runs", f"hydra.sweep.dir={folder}"]
    assert main([*command, "hydra/launcher=gyre_slurm", *where]) == 0
    out = capsys.readouterr().out
    good, bad, refused, bad_too = Manifest.existing(folder).entries
    assert good.job == "77" and good.error is None
    for entry in (bad, bad_too):
        assert entry.run is None and entry.error is not None and "objective.j_max=abc" in entry.error
    assert refused.job is None and refused.error is not None and "invalid schedule_colocate" in refused.error
    before_the_first_job = slurm.manifest_before(0)
    assert before_the_first_job.count("could not be converted") == 2 and '"77"' not in before_the_first_job
    run = Manifest.existing(folder).run_of(good)
    assert run is not None and run.root.name.startswith("quickstart-schedule_async-j_max_5-")
    config = load_run_config(run.root)
    assert (config.schedule.policy, config.objective.j_max, config.cluster.kind) == ("async", 5, "slurm")
    assert list(slurm.scripts) == ["77"] and f"resume={run.root}" in slurm.scripts["77"]
    assert f"{folder}: 1 of 4 points have a job" in out and f"gyre sweep status {folder}" in out
    assert "schedule=async objective.j_max=5: job 77, run " in out


def test_the_same_command_submits_only_what_has_no_job(
    slurm: FakeSlurm, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "train",
        "--multirun",
        "experiment=quickstart",
        "schedule=gyre,async",
        "hydra/launcher=gyre_slurm",
    ]
    where = [f"root={tmp_path}/runs", f"hydra.sweep.dir={folder}"]
    slurm.refuse("schedule_async")
    assert main([*command, *where]) == 0
    slurm.refuse()
    assert main([*command, *where, "cluster.job.time=12:00:00"]) == 0
    assert "schedule=gyre: submitted before, as job 77" in capsys.readouterr().out
    assert jobs(Manifest.existing(folder).entries) == ["77", "78"]
    assert "--time=12:00:00" in slurm.scripts["78"] and "schedule_async" in slurm.scripts["78"]
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_failed_jobs_go_on_in_their_run_when_asked_and_unknown_ones_never(
    slurm: FakeSlurm, folder: Path, tmp_path: Path
) -> None:
    wanted = points(tmp_path, "seed=1", "seed=2", "seed=3", "seed=4")
    before = submitted(folder, wanted)
    assert jobs(before) == ["77", "78", "79", "80"]
    slurm.say(squeue="77|RUNNING", sacct="78|FAILED\n79|COMPLETED")
    assert submitted(folder, wanted) == before
    after = submitted(folder, wanted, retry_failed=True)
    assert jobs(after) == ["77", "81", "79", "80"]
    assert [entry.run for entry in after] == [entry.run for entry in before]
    assert slurm.scripts["81"].splitlines()[-1] == slurm.scripts["78"].splitlines()[-1]


def test_a_job_that_was_submitted_by_hand_counts(slurm: FakeSlurm, folder: Path, tmp_path: Path) -> None:
    wanted = points(tmp_path, "seed=1")
    (entry,) = submitted(folder, wanted)
    slurm.say(squeue="77|FAILED\n78|RUNNING")
    assert main(["submit", f"resume={folder / str(entry.run)}"]) == 0
    assert jobs(submitted(folder, wanted, retry_failed=True)) == ["78"]
    assert list(slurm.scripts) == ["77", "78"]


def test_a_caller_that_died_between_submission_and_record_submits_no_second_job(
    slurm: FakeSlurm, folder: Path, tmp_path: Path
) -> None:
    wanted = points(tmp_path, "seed=1")
    (entry,) = submitted(folder, wanted)
    manifest = Manifest.opened(folder)
    manifest.record(wanted[0], run=manifest.run_of(entry), time=NOON)
    assert jobs(submitted(folder, wanted)) == ["77"] and list(slurm.scripts) == ["77"]


def test_a_caller_that_died_before_submission_uses_the_run_folder_it_made(
    slurm: FakeSlurm, folder: Path, tmp_path: Path
) -> None:
    from gyre_hpc.controller.train import new_run

    wanted = points(tmp_path, "seed=1")
    run = new_run(compose(["cluster=slurm", *wanted[0].overrides]))
    Manifest.opened(folder).record(wanted[0], run=run, time=NOON)
    (entry,) = submitted(folder, wanted)
    assert entry.job == "77" and Manifest.opened(folder).run_of(entry) == run
    assert list((tmp_path / "runs").iterdir()) == [run.root]


def test_a_run_folder_that_is_gone_is_made_again(slurm: FakeSlurm, folder: Path, tmp_path: Path) -> None:
    wanted = points(tmp_path, "seed=1")
    Manifest.opened(folder).record(wanted[0], run=RunLayout(tmp_path / "gone"), time=NOON)
    (entry,) = submitted(folder, wanted)
    assert entry.job == "77" and entry.run is not None and "gone" not in entry.run


def test_what_a_point_would_miss_is_found_ahead_and_a_named_cluster_is_kept(
    slurm: FakeSlurm, folder: Path, tmp_path: Path
) -> None:
    model, local, het = submitted(
        folder,
        points(tmp_path, "model.path=/nowhere", "cluster=local", "cluster.layout=het"),
    )
    assert model.error is not None and "/nowhere" in model.error
    assert local.error is not None and "cluster.kind=local is not run by Slurm" in local.error
    assert het.job == "77" and "#SBATCH hetjob" in slurm.scripts["77"]
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_site_profile_holds_for_every_point(
    slurm: FakeSlurm, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--multirun", "experiment=quickstart", "seed=1,2", "hydra/launcher=gyre_slurm"]
    where = [f"root={tmp_path}/runs", f"hydra.sweep.dir={folder}", f"hydra.launcher.site={SITE}"]
    assert main([*command, *where]) == 0
    assert ["--partition=gpu" in script for script in slurm.scripts.values()] == [True, True]


def test_without_slurm_nothing_is_recorded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(MissingInput, match="srun"):
        submit_points(points(tmp_path, "seed=1"), Manifest.opened(folder), tell=print)
    assert not folder.exists()


def test_another_sweeper_than_ours_can_be_named(
    slurm: FakeSlurm, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra's own composes all points first and refuses the sweep for the bad one."""
    command = [
        "train",
        "--multirun",
        "objective.j_max=1,abc",
        "hydra/launcher=gyre_slurm",
        "hydra/sweeper=basic",
    ]
    assert main([*command, f"root={tmp_path}/runs", f"hydra.sweep.dir={folder}"]) == 2
    assert "Value 'abc' of type" in capsys.readouterr().err and not slurm.scripts


def test_the_launcher_without_a_sweep_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "hydra/launcher=gyre_slurm", f"root={tmp_path}/runs"]) == 2
    err = capsys.readouterr().err
    assert "hydra/launcher=gyre_slurm would count for nothing" in err and "--multirun" in err
    assert list(tmp_path.iterdir()) == []


def test_points_of_another_call_keep_their_lines_in_the_manifest(
    slurm: FakeSlurm, folder: Path, tmp_path: Path
) -> None:
    first, second = points(tmp_path, "seed=1", "seed=2")
    submitted(folder, [first])
    submitted(folder, [second])
    lines = (folder / "manifest.jsonl").read_bytes().splitlines()
    assert jobs([msgspec.json.decode(line, type=Entry) for line in lines]) == ["77", "78"]
