"""`gyre cells add` with a stand-in for sbatch: the job it asks for, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gyre_hpc.cli import main
from gyre_hpc.composition import compose
from gyre_hpc.config import save_run_config
from gyre_hpc.errors import ConfigError
from gyre_hpc.launch.elsewhere.guest_job import HOST_MEM_MB, guest_script, request_for_guests
from gyre_hpc.launch.owner import acquire
from gyre_hpc.layout import RunLayout
from tests.launch.test_script import NAMES, agrees

KEYS = ["experiment=quickstart", "cluster=devcluster", "name=trial"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that this process owns."""
    folder = tmp_path / "run"
    folder.mkdir()
    save_run_config(compose(KEYS), folder)
    acquire(folder)
    return folder


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an sbatch that takes every job as number 78 keeps the script."""
    for name, body in {
        "srun": "",
        "sbatch": f'cp "$1" {tmp_path}/script; echo "Submitted batch job 78"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "script"


def add(run: Path, *arguments: str) -> int:
    return main(["cells", "add", str(run), *arguments])


def test_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(NAMES.python))
    monkeypatch.chdir("/")
    config = compose(
        [*KEYS, "cluster.job.partition=preempt", "cluster.job.requeue=false", "cluster.cell.gres=gpu:2"]
    )
    agrees("guests.sbatch", guest_script(config, RunLayout(NAMES.run), 2, rollout_only=True))


def test_the_job_has_room_for_the_cells_and_their_host_alone() -> None:
    cluster = compose([*KEYS, "cluster.layout=het", "cluster.job.cells_per_node=2"]).cluster
    (component,) = request_for_guests(cluster, 3).components
    assert (component.nodes, component.cpus, component.mem_mb) == (2, 2, 2 * 2048 + HOST_MEM_MB)
    with pytest.raises(ConfigError, match="gyre cells host"):
        request_for_guests(compose(["experiment=quickstart"]).cluster, 1)


def test_the_job_is_the_runs_own_where_nothing_else_is_said(
    run: Path, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert add(run, "--partition=preempt", "--cells=2", "--time=00:10:00", "cluster.job.qos=low") == 0
    out, said = capsys.readouterr().out, script.read_text()
    assert "job     78\n" in out and "scancel 78" in out
    for word in ("--partition=preempt", "--time=00:10:00", "--qos=low", "--nodes=2", "--no-requeue"):
        assert f"#SBATCH {word}\n" in said
    assert said.splitlines()[-1].endswith(f"gyre_hpc.cli cells host {run} --cells=2")
    assert add(run, "--cells=1", "--requeue", "--rollout-only") == 0
    assert "#SBATCH --requeue\n" in script.read_text()
    assert script.read_text().splitlines()[-1].endswith("--cells=1 --rollout-only --requeue")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cells=0"], "--cells=0: nothing would join"),
        (["--cells=1", "schedule.steps=5"], "a run goes on with its own config.yaml"),
        (["--cells=1", "--time=soon"], "cluster.job.time=soon"),
        (["--cells=1", "--time=00:02:00"], "cluster.job.margin_s"),
    ],
)
def test_what_makes_no_job_is_refused(
    run: Path, script: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert add(run, *arguments) == 2
    assert said in capsys.readouterr().err and not script.exists()


def test_nothing_is_submitted_for_a_run_that_nobody_owns(
    run: Path, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "owner").unlink()
    assert add(run, "--cells=1") == 2
    assert "no controller of this run is alive" in capsys.readouterr().err and not script.exists()
    assert add(run, "--cells=1", "--dry-run") == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n# Written by gyre for ")
