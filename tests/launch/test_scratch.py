"""What a run keeps on a node outside its run folder: one folder per job and run, gone when nobody needs it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from gyre_hpc.composition import compose
from gyre_hpc.config import save_run_config
from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.launch.choice import _ended_jobs, may_find_leftovers
from gyre_hpc.launch.commands import SlurmCommandFailed
from gyre_hpc.launch.job import state as job_state
from gyre_hpc.launch.nodes.scratch import CACHES, base_folder, entered, job_folder, main
from gyre_hpc.launch.owner import Owner
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.region_files import MARK, make_owner_folder, run_folder
from gyre_hpc.transport.regions import run_key
from gyre_hpc.transport.rendezvous import write_secret

PROCESS = """
import os, subprocess, sys, tempfile
from pathlib import Path
from gyre_hpc.launch.nodes.scratch import process_scratch
with process_scratch(Path(sys.argv[1]), sys.argv[2]) as own:
    child = subprocess.check_output([sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"], text=True)
    assert Path(child.strip()) == Path(tempfile.gettempdir()) == own
    assert own.parent.stat().st_mode & 0o777 == 0o700
    (own / "file").touch()
    if sys.argv[3:]: os._exit(9)
    print(os.environ["TRITON_CACHE_DIR"])
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SLURM_TMPDIR", "SLURM_JOB_ID", *CACHES):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "node"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def a_run(tmp_path: Path, name: str) -> RunLayout:
    layout = RunLayout(tmp_path / name)
    layout.root.mkdir()
    save_run_config(compose([]), layout.root)
    return layout


def process(layout: RunLayout, name: str, *how: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, layout.root, name, *how], capture_output=True, text=True
    )
    assert done.returncode == (9 if how else 0), done.stderr
    return done.stdout.strip()


def test_the_base_is_what_the_node_has(tmp_path: Path) -> None:
    here, env = str(tmp_path), {"SLURM_TMPDIR": "/not/on/this/node", "TMPDIR": "/nor/this"}
    assert base_folder("", env) == Path("/tmp")
    assert base_folder("", env | {"TMPDIR": here}) == tmp_path
    assert base_folder("", env | {"SLURM_TMPDIR": here}) == tmp_path
    assert base_folder(here, {"SLURM_TMPDIR": "/tmp"}) == tmp_path


def test_runs_and_jobs_that_share_a_node_share_no_folder(base: Path, tmp_path: Path) -> None:
    layouts = [RunLayout(tmp_path / name) for name in ("a", "b")]
    folders = {
        job_folder("", layout, os.environ | {"SLURM_JOB_ID": job}) for layout in layouts for job in "12"
    }
    assert len(folders) == 4 and {folder.parent for folder in folders} == {base}


def test_processes_of_a_job_share_caches_and_nothing_else(base: Path, tmp_path: Path) -> None:
    layout = a_run(tmp_path, "run")
    caches = {process(layout, name) for name in ("cell-0", "cell-1")}
    job = job_folder("", layout)
    assert caches == {str(job / "cache" / "triton")} and list(base.iterdir()) == []
    (job / "cache").mkdir(parents=True)
    (job / "cache" / "kernel").touch()
    process(layout, "cell-0")
    assert {folder.name for folder in job.iterdir()} == {"cache", MARK}


def test_what_a_killed_process_left_goes_at_its_next_start_or_with_the_job(
    base: Path, tmp_path: Path
) -> None:
    layout, other = a_run(tmp_path, "run"), a_run(tmp_path, "other")
    regions = make_owner_folder(run_key(write_secret(layout)), "cell-0")
    for name in ("cell-0", "cell-1"):
        process(layout, name, "killed")
    process(other, "cell-0", "killed")
    left = job_folder("", layout)
    process(layout, "cell-0")
    assert {folder.name for folder in left.iterdir()} == {"cell-1", MARK}
    assert main(["--run", str(layout.root)]) == 0
    assert not left.exists() and not regions.exists() and not run_folder(regions.parents[1].name[5:]).exists()
    assert (job_folder("", other) / "cell-0" / "file").exists()


def test_what_an_ended_job_of_the_run_left_goes_with_a_later_one_and_nothing_else(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, other = a_run(tmp_path, "run"), a_run(tmp_path, "other")
    folders = {}
    for name, run, job in (
        ("ended", layout, "7"),
        ("living", layout, "8"),
        ("unmarked", layout, "9"),
        ("another's", other, "7"),
    ):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        process(run, "cell-0", "killed")
        folders[name] = job_folder("", run)
    (folders["unmarked"] / MARK).unlink()
    monkeypatch.setenv("SLURM_JOB_ID", "10")
    assert main(["--run", str(layout.root), "--ended", "7", "9", "../7"]) == 0
    assert {name for name, folder in folders.items() if folder.exists()} == {
        "living",
        "unmarked",
        "another's",
    }


def test_only_jobs_that_slurm_calls_ended_or_has_forgotten_are_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = a_run(tmp_path, "run")
    layout.jobs.mkdir()
    for job in ("3", "4", "5", "6"):
        (layout.jobs / f"{job}_submission.sh").touch()
    (layout.jobs / ".submission_file_x.sh").touch()
    (layout.root / "owner").write_bytes(msgspec.json.encode(Owner(1, "2", 0, "here", "", 1, 0.0)))
    (layout.root / "owner.2").write_text("torn")
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    answer = "3|COMPLETED\n4|RUNNING\n5+0|PENDING\n5+1|FAILED"
    monkeypatch.setattr(job_state, "query", lambda *argv: answer)
    assert _ended_jobs(layout) == ["2", "3"]

    def silent(*argv: str) -> str:
        raise SlurmCommandFailed("Unable to contact slurm controller")

    monkeypatch.setattr(job_state, "query", silent)
    assert _ended_jobs(layout) == []


def test_a_cache_that_is_set_stays_where_it_is(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", "/scratch/models")
    monkeypatch.setattr(tempfile, "tempdir", None)
    layout = a_run(tmp_path, "run")
    with monkeypatch.context() as patch:
        for name in ("TMPDIR", *CACHES):
            patch.setenv(name, os.environ.get(name, ""))
        for name in CACHES.keys() - {"HF_HOME"}:
            patch.delenv(name)
        with entered("", layout, "cell-0") as own:
            assert os.environ["HF_HOME"] == "/scratch/models" and os.environ["TMPDIR"] == str(own)


def test_a_run_that_goes_on_under_slurm_looks_for_what_earlier_jobs_left() -> None:
    """A successor and a run that is submitted again, too: their job was never started before."""
    slurm, local = ClusterConfig(kind="slurm"), ClusterConfig(kind="local")
    assert may_find_leftovers(slurm, 2) and not may_find_leftovers(slurm, 1)
    assert not may_find_leftovers(local, 2), "gateway and runner may have outlived their controller"
